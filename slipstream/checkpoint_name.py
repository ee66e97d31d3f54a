"""RUN[@STEP], as commands take it: which checkpoint of a run is meant, and the words where there is no such one.

STEP is a number, `latest`, or `best`: the one with the longest accepted length on held-out answers. No torch here: a
wrong name is refused before torch is imported.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from slipstream.errors import SlipstreamError
from slipstream.launcher.home import run_directories
from slipstream.run_spec.reasons import Reason

MANIFEST = "manifest.json"
"""What a directory is a checkpoint by: written last, it names the other files."""
NEWEST = ("", "latest")
"""What chooses the newest one."""
_NUMBER = re.compile(r"(?:step-)?0*(\d+)")


def split_name(text: str) -> tuple[str, str]:
    """(run, choice): what stands before and behind the last @; the choice is empty where there is none."""
    run, separator, choice = text.rpartition("@")
    return (run, choice) if separator else (text, "")


@dataclass(frozen=True)
class SavedSteps:
    """The checkpoints that a run has, by their steps."""

    run: str
    """As messages call it."""
    steps: Collection[int]
    newest: int | None
    best: int | None
    """None where none was measured."""

    def choose(self, choice: str) -> int:
        """The step that is meant.

        Raises:
            SlipstreamError: CHECKPOINT_INVALID, naming the steps that are there.
        """
        if not self.steps:
            raise SlipstreamError(
                f"{self.run} has no checkpoint yet",
                reason=Reason.CHECKPOINT_INVALID,
                remedy="One is written every checkpoint.every_steps, at the end, and when the run is paused.",
            )
        if choice == "best":
            return self._best()
        number = _NUMBER.fullmatch(choice)
        step = self.newest if choice in NEWEST else int(number.group(1)) if number else None
        if step is not None and step in self.steps:
            return step
        raise SlipstreamError(
            f"{self.run} has no checkpoint of step {choice}, "
            f"expected one of: {', '.join(map(str, sorted(self.steps)))}",
            reason=Reason.CHECKPOINT_INVALID,
            remedy="Name one of these, or leave @STEP out for the newest; `slipstream checkpoint ls RUN` lists them.",
        )

    def _best(self) -> int:
        if self.best is None:
            raise SlipstreamError(
                f"{self.run} has no best checkpoint: none was measured while it trained",
                reason=Reason.CHECKPOINT_INVALID,
                remedy="Leave @best out for the newest; a run with eval.heldout measures its checkpoints.",
            )
        return self.best


def find_checkpoint(text: str, home: Path | None = None) -> Path:
    """What is there under this name as it is, else a run's directory here or in the local stack, and its checkpoint.

    A run's directory stands for its newest checkpoint: who opens it finds the newest that is sound.

    Args:
        text: a path, or RUN[@STEP], where RUN is a directory or a name.
        home: of the local stack, as --home of a command line.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID, naming what was looked for, or the checkpoints that are there.
    """
    if Path(text).exists():
        return Path(text)
    run, choice = split_name(text)
    return chosen_checkpoint(first_of(places_of(run, home), run), choice)


def chosen_checkpoint(run_directory: Path, choice: str) -> Path:
    """The one that is meant; the directory of the run itself where it is the newest.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID, naming the steps that are there.
    """
    if choice in NEWEST:
        return run_directory
    checkpoints = run_directory / "checkpoints"
    return checkpoint_directory(checkpoints, saved_steps(str(run_directory), checkpoints).choose(choice))


def saved_steps(run: str, checkpoints: Path) -> SavedSteps:
    """Of the run whose checkpoints lie in this directory."""
    steps = {int(one.name.removeprefix("step-")) for one in checkpoints.glob("step-" + "[0-9]" * 8)}
    return SavedSteps(run, steps, max(steps, default=None), linked_step(checkpoints, "best"))


def reported_steps(run: str, paths: Mapping[int, str], best: int | None) -> SavedSteps:
    """Of a run that the control API knows.

    Args:
        run: as messages call it.
        paths: of its checkpoints, by step, as trainers have reported them.
        best: the step of the one that was reported as the best.
    """
    newest = max(paths, default=None)
    if best is None and newest is not None:
        # Of a run that had ended before the API knew of best ones, a link may say it, where this user may look there.
        with suppress(OSError):
            linked = linked_step(Path(paths[newest]).parent, "best")
            # One that was saved a moment ago is not reported yet.
            best = linked if linked in paths else None
    return SavedSteps(run, paths.keys(), newest, best)


def linked_step(checkpoints: Path, link: str) -> int | None:
    """The step that `best` or `latest` points to; None where it points to nothing."""
    path = checkpoints / link
    number = _NUMBER.fullmatch(path.readlink().name) if path.is_symlink() and path.exists() else None
    return int(number.group(1)) if number else None


def checkpoint_directory(checkpoints: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return checkpoints / f"step-{step:08d}"


def places_of(run: str, home: Path | None = None) -> list[Path]:
    """Where a run of this name, or the directory of this path, may lie on this machine."""
    return [Path(run), *run_directories(run, home)] if run else []


def first_of(looked_for: Sequence[Path], run: str) -> Path:
    """The first of these directories that is there.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID, naming them all.
    """
    for directory in looked_for:
        if directory.is_dir():
            return directory
    raise SlipstreamError(
        f"there is no checkpoint or run {run!r}; looked for {', '.join(map(str, looked_for))}",
        reason=Reason.CHECKPOINT_INVALID,
        remedy="Name a run or its directory, with @STEP for another checkpoint than the newest: `slipstream run ls` "
        "lists the runs, `slipstream checkpoint ls RUN` the checkpoints of one.",
    )
