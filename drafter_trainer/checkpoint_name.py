"""RUN[@STEP] of a command line: a path, or the name of a run in runs/ or in the local stack. No torch here."""

import re
from pathlib import Path

from drafter_trainer.checkpoint_state import best_checkpoint, by_age, newest_checkpoint
from slipstream.errors import SlipstreamError
from slipstream.launcher.home import run_directories
from slipstream.run_spec.reasons import Reason


def find_checkpoint(text: str) -> Path:
    """What is there under this name as it is, else the checkpoint of a run that the part behind the last @ chooses.

    That part is a step, `latest`, or `best`: the one with the longest accepted length on held-out answers.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID, naming what was looked for, or the checkpoints that are there.
    """
    if Path(text).exists():
        return Path(text)
    run, separator, step = text.rpartition("@")
    if not separator:
        return _run_directory(text)
    directory = _run_directory(run)
    checkpoints = directory / "checkpoints"
    if step == "latest":
        return newest_checkpoint(checkpoints) or directory
    if step == "best":
        return _best(directory)
    wanted = checkpoints / (f"step-{int(step):08d}" if re.fullmatch(r"\d{1,8}", step) else step)
    if wanted.is_dir() and wanted.parent == checkpoints:
        return wanted
    there = [str(int(one.name.removeprefix("step-"))) for one in by_age(checkpoints.glob("step-" + "[0-9]" * 8))]
    raise SlipstreamError(
        f"{directory} has no checkpoint of step {step}, expected one of: {', '.join(there) or 'none is there'}",
        reason=Reason.CHECKPOINT_INVALID,
        remedy="Name one of these, or leave @STEP out for the newest.",
    )


def _best(directory: Path) -> Path:
    best = best_checkpoint(directory / "checkpoints")
    if best is None:
        raise SlipstreamError(
            f"{directory} has no best checkpoint: none was measured while it trained",
            reason=Reason.CHECKPOINT_INVALID,
            remedy="Leave @best out for the newest; a run with eval.heldout measures its checkpoints.",
        )
    return best


def _run_directory(name: str) -> Path:
    looked_for = [Path(name), *run_directories(name)]
    for directory in looked_for:
        if directory.is_dir():
            return directory
    raise SlipstreamError(
        f"there is no checkpoint or run {name!r}; looked for {', '.join(map(str, looked_for))}",
        reason=Reason.CHECKPOINT_INVALID,
        remedy="Name a run or its directory, with @STEP for another checkpoint than the newest: `slipstream run ls` "
        "lists the runs, `slipstream checkpoint ls RUN` the checkpoints of one.",
    )
