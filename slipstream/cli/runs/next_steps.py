"""What a person does next with a run, by its state. After a failure that would only repeat: what to change first."""

import argparse
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.cli.api_access import say_next
from slipstream.cli.runs import figures
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.states import Condition

_MOST_OF_A_NAME = 61
"""Characters, with room for another two."""
_SETTING = r"--set [a-z_]+\.[a-z_]+=\w*"
_SETTINGS = re.compile(f"{_SETTING}(?: {_SETTING})*")
"""As `slipstream.plan.refusal.in_words` puts them: together what fits, the nearest first."""


@dataclass(frozen=True)
class _Change:
    """What has to be another before there is another try."""

    words: str
    lower: tuple[str, str] = ("", "")
    """The setting that is proposed, as section and key."""
    is_defined: bool = False
    """The definition says it, which a run keeps: only a new run can have another one."""
    setting: str = "KEY=VALUE"
    """What the new run is given, where nothing better is known."""


_CHANGE_FIRST = {
    Reason.SPEC_INVALID: _Change("the setting that the message names", is_defined=True),
    Reason.TARGET_INCOMPATIBLE: _Change(
        "the target, or the drafter's settings that the message names", is_defined=True
    ),
    Reason.LOSS_NOT_FINITE: _Change(
        "{what}, in a new run, or what else the message names",
        lower=("optimizer", "learning_rate"),
        is_defined=True,
    ),
    Reason.OUT_OF_MEMORY: _Change(
        "{what}, in a new run; or end what else fills that memory, and resume this one",
        lower=("train", "anchors_per_pack"),
        is_defined=True,
    ),
    Reason.DATA_INVALID: _Change("the data that the message names"),
    Reason.MODEL_INVALID: _Change("the model's files, as the message says"),
    Reason.PATH_NOT_ALLOWED: _Change("the path, or who may use it, as the message says"),
    Reason.CHECKPOINT_INVALID: _Change("the checkpoint that the message names"),
    Reason.ENVIRONMENT_UNSUPPORTED: _Change("the trainer, or its machine, as the message says"),
    Reason.TARGET_FINGERPRINT_MISMATCH: _Change("the model that the target server serves, back to that of the run"),
    Reason.DISK_FULL: _Change("the room on the disk that the message names"),
}
"""By reasons with which the next try would end as this one did."""
_FIRST_DRAFTER = "drafter.init_from"
_OTHER_DRAFTER = _Change(f"{_FIRST_DRAFTER}, in a new run", is_defined=True, setting=f"{_FIRST_DRAFTER}=RUN")
"""Where the checkpoint is not the run's own, but the one that it should begin with."""
_HELDOUT = _Change("the held-out answers, as the message says")
"""Where the target is right, and the answers are another one's."""


def say_next_steps(args: argparse.Namespace, run: figures.Json) -> None:
    """Print them on stderr, as `say_next` does."""
    if args.output != "json" and (what := change_first(run)) is not None:
        print(f"change first: {what}", file=sys.stderr)
    say_next(args, *next_commands(run))


def change_first(run: figures.Json) -> str | None:
    """What to change before another try; None where it may end better by itself."""
    change = _change(run)
    if change is None:
        return None
    value = _defined(run, change.lower)
    now = "" if value is None else f" ({_written(value)})"
    what = "what the message proposes" if _proposed(run) else ".".join(change.lower) + now
    return change.words.format(what=what)


def next_commands(run: figures.Json) -> list[str]:
    """What a person does with a run in this state."""
    name, state = shlex.quote(run["name"]), run["state"]
    if state == "PENDING":
        if figures.unfit(run) is not None:  # one more of these trainers would not help
            return ["trainer ls", f"run stop {name}"]
        waits_for_trainer = any(one["type"] == Condition.NO_TRAINER_FREE for one in run["conditions"])
        return ["trainer start"] if waits_for_trainer else [f"run watch {name}"]
    if state == "SUCCEEDED":
        return [f"checkpoint ls {name}"]
    if state == "FAILED":
        return [f"run logs {name} --tail 50", *_after_failure(run, name)]
    return [f"run resume {name}"] if state in ("PAUSED", "STOPPED") else [f"run watch {name}"]


def _after_failure(run: figures.Json, name: str) -> list[str]:
    change = _change(run)
    if change is None or not change.is_defined:
        return [f"run resume {name}"]
    other = shlex.quote(f"{run['name'][:_MOST_OF_A_NAME]}-2")
    value = _defined(run, change.lower)
    lower = None if value is None else _half(value)
    setting = change.setting if lower is None else f"{'.'.join(change.lower)}={_written(lower)}"
    settings = _proposed(run) or f"--set {setting}"
    return [f"run get {name} --spec > {other}.toml", f"run create {other}.toml --name {other} {settings}"]


def _change(run: figures.Json) -> _Change | None:
    if run["state"] != "FAILED":
        return None
    reason, message = run["reason"], run["message"] or ""
    if reason == Reason.CHECKPOINT_INVALID and message.startswith(_FIRST_DRAFTER):
        return _OTHER_DRAFTER
    if reason == Reason.TARGET_FINGERPRINT_MISMATCH and message.startswith("eval.heldout"):
        return _HELDOUT
    return _CHANGE_FIRST.get(reason)


def _proposed(run: figures.Json) -> str | None:
    """The nearest settings that fit, where the message of a full memory names them."""
    if run["reason"] != Reason.OUT_OF_MEMORY:
        return None
    found = _SETTINGS.search(run["message"] or "")
    return None if found is None else found.group()


def _defined(run: figures.Json, key: tuple[str, str]) -> float | None:
    """The number that the run's definition has there; lists of runs come without definitions."""
    section: Any = run.get("spec", {}).get(key[0])
    value = section.get(key[1]) if isinstance(section, Mapping) else None
    return value if isinstance(value, int | float) else None


def _half(value: float) -> float | None:
    """None where there is no half of it: a count of 1 is the least."""
    half = value // 2 if isinstance(value, int) else value / 2
    return half or None


def _written(value: float) -> str:
    """As a recipe takes it: a count in full."""
    return str(value) if isinstance(value, int) else f"{value:g}"
