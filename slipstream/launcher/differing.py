"""What `slipstream up` is asked for and a stack that is up does not have: nothing of a running stack is changed."""

import json
from collections.abc import Iterator

from slipstream.launcher.planning import Wanted, require_sense, resolve_target
from slipstream.launcher.stack import Stack
from slipstream.run_spec.overrides import Override, parse_override
from slipstream.run_spec.spec import TargetSpec


def differences(wanted: Wanted, running: Stack) -> list[str]:
    """What is asked and is not so, each with what the running stack has in its place.

    Raises:
        SlipstreamError: what is asked makes no sense.
    """
    require_sense(wanted)
    parts = (_target, _places, _access, _settings)
    return [f"{asked} (it has {has})" for part in parts for asked, has in part(wanted, running)]


def _target(wanted: Wanted, running: Stack) -> Iterator[tuple[str, str]]:
    target = running.target
    if wanted.no_target:
        if target is not None:
            yield "--no-target", f"the target {target.model.model}"
        return
    if wanted.names_a_target:
        model = resolve_target(wanted)[0]
        if target is None or target.model != model:
            yield f"the target {_model_words(model)}", _model_words(target.model) if target else "none"


def _model_words(model: TargetSpec) -> str:
    said = model.model_dump(exclude={"model", "dtype"}, exclude_defaults=True)
    return ", ".join([f"{model.model} in {model.dtype}", *(f"{key} {value}" for key, value in said.items())])


def _places(wanted: Wanted, running: Stack) -> Iterator[tuple[str, str]]:
    target = running.target
    if wanted.devices is not None and (target is None or target.device != wanted.devices):
        yield f"--devices {wanted.devices}", target.device if target else "no target"
    if wanted.tensor_parallel is not None and (target is None or target.tensor_parallel != wanted.tensor_parallel):
        yield f"--tensor-parallel {wanted.tensor_parallel}", str(target.tensor_parallel) if target else "no target"
    devices = tuple(trainer.device for trainer in running.trainers)
    if wanted.trainers not in (None, len(devices)):
        yield f"--trainers {wanted.trainers}", str(len(devices))
    if wanted.trainer_devices and wanted.trainer_devices != devices:
        yield f"--trainer-devices {','.join(wanted.trainer_devices)}", ",".join(devices) or "no trainer"


def _access(wanted: Wanted, running: Stack) -> Iterator[tuple[str, str]]:
    for flag, asked, part in (
        ("--listen", wanted.listen, running.api),
        ("--target-listen", wanted.target_listen, running.target),
    ):
        if asked is not None and (part is None or asked not in (part.listen, part.address)):
            yield f"{flag} {asked}", part.address if part else "no target"
    for root in wanted.data_roots:
        if str(root.absolute()) not in running.data_roots:
            yield f"--data-root {root}", " ".join(running.data_roots)
    if wanted.token_file is not None and str(wanted.token_file.absolute()) != running.token_file:
        yield f"--token-file {wanted.token_file}", running.token_file or "no token"


def _settings(wanted: Wanted, running: Stack) -> Iterator[tuple[str, str]]:
    """Settings of runs: `up` only puts them into the command that it proposes; those of the target are compared."""
    had = [parse_override(word) for word in running.example[2::2]]  # RECIPE --set … --set …
    for text in wanted.overrides:
        override = parse_override(text)
        if override.path[0] != "target" and override not in had:
            yield f"--set {text}", _value(override, had)


def _value(override: Override, had: list[Override]) -> str:
    found = next((one for one in reversed(had) if one.key == override.key), None)
    return "its recipe's" if found is None or found.remove else json.dumps(found.value, ensure_ascii=False)
