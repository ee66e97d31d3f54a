"""From what a command line said, and what the machine has, to a stack; nothing is started, nothing is written."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import recipes
from slipstream.engine_devices import check_present, engine_groups
from slipstream.errors import SlipstreamError
from slipstream.launcher.stack import (
    API,
    TARGET,
    ApiPart,
    ServicePart,
    Stack,
    TargetPart,
    TrainerPart,
    free_name,
    require_device,
)
from slipstream.listen import ListenAddress
from slipstream.machine_probe import probe_torch, usable_cores
from slipstream.packaged_model import RECIPE, given_model, names_model, packaged_copy, packaged_model, target_here
from slipstream.run_spec.data_entries import directories_of
from slipstream.run_spec.device import overrides_for
from slipstream.run_spec.load import load_recipe
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import TargetSpec

API_LISTEN = "127.0.0.1:8080"
TARGET_LISTEN = "127.0.0.1:50051"
TARGET_NAME = "local"


@dataclass(frozen=True)
class Wanted:
    """What a person asked for; None and empty: nothing was said, the default holds."""

    recipe: str | None = None
    """A file, or the name of a recipe that ships. Only its target is served: runs bring their own settings."""
    model: str | None = None
    overrides: tuple[str, ...] = ()
    listen: str | None = None
    target_listen: str | None = None
    trainers: int | None = None
    devices: str | None = None
    """The target's: one, or several with commas between them for an engine on each."""
    tensor_parallel: int | None = None
    """Devices that share the layers of an engine."""
    trainer_devices: tuple[str, ...] = ()
    no_target: bool = False
    data_roots: tuple[Path, ...] = ()
    token_file: Path | None = None

    @property
    def names_a_target(self) -> bool:
        """Whether it says which model to serve."""
        return self.recipe is not None or self.model is not None or bool(self.overrides)

    @property
    def places(self) -> bool:
        """Whether it says where anything runs."""
        return self.trainers is not None or self.devices is not None or bool(self.trainer_devices)


@dataclass(frozen=True)
class Placement:
    """Who computes where, with how many CPU threads."""

    target: str
    """One device, or several with commas between them."""
    target_threads: int | None
    trainers: tuple[str, ...]
    trainer_threads: int | None


def plan_stack(wanted: Wanted, before: Stack | None, *, working_directory: Path) -> Stack:
    """The stack that is wanted.

    Naming a recipe, a model or an override asks for a new stack; else the one from before, with the rest that is said
    changed; else the demo's.

    Args:
        wanted: of the command line.
        before: stack.json of the home.
        working_directory: runs may name files in it.

    Raises:
        SlipstreamError: SPEC_INVALID; MODEL_INVALID; ENVIRONMENT_UNSUPPORTED, a device that is not there.
    """
    require_sense(wanted)
    begins_target = before is not None and before.target is None and (wanted.devices or wanted.target_listen)
    base = None if wanted.names_a_target or begins_target else before
    if base is None:
        model, roots = (None, ()) if wanted.no_target else resolve_target(wanted)
        # What ships with Slipstream may always be named.
        roots = (*roots, str(working_directory), str(Path(recipes.__file__).parent))
    else:
        model = base.target.model if base.target and not wanted.no_target else None
        roots = base.data_roots
    token_file = str(wanted.token_file.absolute()) if wanted.token_file else before.token_file if before else None
    stack = Stack(
        api=ApiPart(listen=_listen(wanted.listen, base.api.listen if base else API_LISTEN), address=""),
        target=None,
        trainers=base.trainers if base else (),
        data_roots=tuple(dict.fromkeys((*roots, *(str(root.absolute()) for root in wanted.data_roots)))),
        confined=bool(wanted.data_roots) or (base is not None and base.confined),
        token_file=token_file,
        example=base.example if base else (),
    )
    return _placed(stack, wanted, base, model)


def resolve_target(wanted: Wanted) -> tuple[TargetSpec, tuple[str, ...]]:
    """The model to serve, and the directories that its recipe names files in (its own first).

    Raises:
        SlipstreamError: SPEC_INVALID, MODEL_INVALID.
    """
    overrides = list(wanted.overrides)
    if wanted.model is not None:
        overrides.insert(0, f"target.model={given_model(wanted.model)}")
    elif wanted.recipe is None:
        overrides.insert(0, f"target.model={packaged_model()}")
    path = recipes.find_recipe(wanted.recipe or RECIPE)
    spec = load_recipe(path, overrides).spec
    if wanted.recipe == RECIPE and (packaged := packaged_copy(spec.target)) and not names_model(overrides):
        # The recipe of the packaged model, named or not: one that is there is not downloaded.
        target = spec.target.model_copy(update={"model": packaged})
    else:
        target = target_here(spec.target)
    files = (*spec.data.files, *(file for file in (spec.eval.prompts, spec.eval.heldout) if file))
    places = (str(path.absolute().parent), *map(str, directories_of(files)))
    return target, tuple(dict.fromkeys(places))


def require_sense(wanted: Wanted) -> None:
    """Refuse what makes no sense, before anything is asked or read.

    Raises:
        SlipstreamError: SPEC_INVALID; ENVIRONMENT_UNSUPPORTED.
    """
    for device in (*wanted.trainer_devices, *_target_devices(wanted)[:1]):
        require_device(device)
    if len(_target_devices(wanted)) != 1 or wanted.tensor_parallel is not None:
        engine_groups(wanted.devices, wanted.tensor_parallel or 1)
    if wanted.trainers is not None and wanted.trainer_devices and wanted.trainers != len(wanted.trainer_devices):
        raise SlipstreamError(
            f"--trainers is {wanted.trainers}, --trainer-devices names {len(wanted.trainer_devices)}",
            reason=Reason.SPEC_INVALID,
            remedy="Give one of the two.",
        )
    if wanted.no_target and (wanted.names_a_target or wanted.devices or wanted.tensor_parallel or wanted.target_listen):
        raise SlipstreamError(
            "--no-target, and yet something is said of the target",
            reason=Reason.SPEC_INVALID,
            remedy="Leave out one of the two.",
        )
    for flag, text in (("--listen", wanted.listen), ("--target-listen", wanted.target_listen)):
        if text is not None:
            ListenAddress.parse(text, flag)


def place(wanted: Wanted, *, num_gpus: int, cores: int) -> Placement:
    """Who computes where.

    On a CPU both share the cores: more threads than cores would make each wait for the other. One GPU is shared too;
    of several, the first, or those that are named, are the target's and each other one has a trainer.

    Raises:
        SlipstreamError: SPEC_INVALID, ENVIRONMENT_UNSUPPORTED.
    """
    target = wanted.devices or ("cuda:0" if num_gpus else "cpu")
    if wanted.trainer_devices:
        trainers = wanted.trainer_devices
    else:
        taken = set() if wanted.no_target or num_gpus == 1 else {_index(device) for device in target.split(",")}
        free = [f"cuda:{number}" for number in range(num_gpus) if number not in taken] or ["cpu"]
        count = wanted.trainers if wanted.trainers is not None else len(free)
        trainers = tuple(free[number % len(free)] for number in range(count))
    check_present(target.split(","), num_gpus)
    check_present(trainers, num_gpus, "--trainer-devices")
    on_cpu = sum(device == "cpu" for device in trainers)
    target_threads = None
    if target.startswith("cpu") and not wanted.no_target:
        target_threads = max(1, cores // 2) if on_cpu else cores
    rest = cores - (target_threads or 0)
    return Placement(target, target_threads, trainers, max(1, rest // on_cpu) if on_cpu else None)


def choose_address(listen: str, before: str | None) -> str:
    """HOST:PORT to use for one that was asked for: port 0 keeps the port it got before, while that is free.

    Raises:
        SlipstreamError: PORT_IN_USE; SPEC_INVALID, the host is not of this machine.
    """
    address = ListenAddress.parse(listen)
    if address.port:
        address.bind().close()
        return str(address)
    if before is not None and _is_free(ListenAddress.parse(before)):
        return before
    # Not a port that the system gives to outgoing connections: it would be lost while the process restarts, even to a
    # client that tries to reach just this process.
    for port in random.sample(range(20000, 32768), 200):
        if _is_free(candidate := ListenAddress(address.host, port)):
            return str(candidate)
    with address.bind() as bound:
        return str(ListenAddress(address.host, bound.getsockname()[1]))


def with_addresses(stack: Stack, before: Stack | None, is_ours: Callable[[str], bool]) -> Stack:
    """The stack with the addresses that its services will really use.

    Args:
        stack: as planned.
        before: stack.json of the home; its ports are kept where they still fit.
        is_ours: whether the process of this name is still alive, and so holds the address it had before.

    Raises:
        SlipstreamError: PORT_IN_USE; SPEC_INVALID, the host is not of this machine.
    """

    def settle(part: ServicePart, earlier: ServicePart | None, name: str) -> dict[str, str]:
        kept = earlier.address if earlier and earlier.listen == part.listen else None
        if kept is not None and is_ours(name):
            return {"address": kept}
        return {"address": choose_address(part.listen, kept)}

    api = stack.api.model_copy(update=settle(stack.api, before.api if before else None, API))
    if stack.target is None:
        return stack.model_copy(update={"api": api})
    target = stack.target.model_copy(update=settle(stack.target, before.target if before else None, TARGET))
    if ListenAddress.parse(target.address).port == ListenAddress.parse(api.address).port:
        raise SlipstreamError(
            f"control API and target server would both listen on port {ListenAddress.parse(api.address).port}",
            reason=Reason.PORT_IN_USE,
            remedy="Give them different ports with --listen and --target-listen.",
        )
    return stack.model_copy(update={"api": api, "target": target})


def _placed(stack: Stack, wanted: Wanted, base: Stack | None, model: TargetSpec | None) -> Stack:
    """The stack with target and trainers: where they were before if nothing is said of that, else newly placed."""
    before = base.target if base else None
    if base is not None and not wanted.places and (before is None) == (model is None):
        device, threads = (before.device, before.threads) if before else ("", None)
        ranks = before.tensor_parallel if before else 1
    else:
        placement = place(wanted, num_gpus=_count_gpus(wanted), cores=usable_cores())
        stack = stack.model_copy(update={"trainers": _trainers(placement)})
        device, threads, ranks = placement.target, placement.target_threads, wanted.tensor_parallel or 1
    if model is None:
        return stack
    listen = _listen(wanted.target_listen, before.listen if before else TARGET_LISTEN)
    target = TargetPart(
        name=TARGET_NAME,
        listen=listen,
        address="",
        model=model,
        device=device,
        tensor_parallel=ranks,
        threads=threads,
    )
    example = stack.example or example_run(wanted, model, stack.trainers)
    return stack.model_copy(update={"target": target, "example": example})


def example_run(wanted: Wanted, model: TargetSpec, trainers: tuple[TrainerPart, ...]) -> tuple[str, ...]:
    """Arguments of `slipstream run create` for the recipe that the stack was planned from, so that its trainers can
    train it."""
    overrides = list(wanted.overrides)
    recipe = wanted.recipe or RECIPE
    if load_recipe(recipes.find_recipe(recipe), overrides).spec.target.model != model.model:
        overrides.append(f"target.model={model.model}")
    if trainers:
        on_gpu = any(trainer.device != "cpu" for trainer in trainers)
        # Who asks for a device gets it; but without a GPU there is only one.
        if not on_gpu or not any(one.partition("=")[0].strip() == "train.device" for one in wanted.overrides):
            spec = load_recipe(recipes.find_recipe(recipe), overrides).spec
            overrides += overrides_for(spec.train, "cuda" if on_gpu else "cpu")
    # It is used in another directory, perhaps.
    recipe = str(Path(recipe).absolute()) if Path(recipe).exists() else recipe
    return (recipe, *(word for item in overrides for word in ("--set", item)))


def _count_gpus(wanted: Wanted) -> int:
    """GPUs that torch sees; asking takes seconds, so it is not asked where everything is said to be on the CPU."""
    devices = {*wanted.trainer_devices, *_target_devices(wanted), "cpu" if wanted.no_target else ""} - {""}
    all_said = bool(wanted.trainer_devices or wanted.trainers == 0) and bool(wanted.devices or wanted.no_target)
    return 0 if all_said and devices == {"cpu"} else len(probe_torch().gpus)


def _target_devices(wanted: Wanted) -> list[str]:
    return wanted.devices.split(",") if wanted.devices else []


def _trainers(placement: Placement) -> tuple[TrainerPart, ...]:
    trainers: list[TrainerPart] = []
    for device in placement.trainers:
        name = free_name(device, [one.name for one in trainers])
        threads = placement.trainer_threads if device == "cpu" else None
        trainers.append(TrainerPart(name=name, device=device, threads=threads))
    return tuple(trainers)


def _listen(said: str | None, otherwise: str) -> str:
    return otherwise if said is None else said


def _index(device: str) -> int | None:
    """Number of a GPU; None for the CPU."""
    return int(device.partition(":")[2] or 0) if device.startswith("cuda") else None


def _is_free(address: ListenAddress) -> bool:
    try:
        address.bind().close()
    except SlipstreamError:
        return False
    return True
