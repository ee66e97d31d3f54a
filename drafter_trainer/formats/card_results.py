"""What a model card says was measured: by `slipstream eval` of this very checkpoint, else while the run trained."""

import json
from pathlib import Path
from typing import Any

from drafter_trainer.checkpoint_state import CheckpointState
from drafter_trainer.evaluation.report import (
    answers_in_words,
    losslessness_in_words,
    part_batches_in_words,
    positions_in_words,
    row_in_words,
    shown_sources,
)
from drafter_trainer.evaluation.report_pages import markdown_row
from drafter_trainer.evaluation.setting import Setting
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason

_TITLES = (
    "| setting | decoding | source | prompts | tokens | accepted length | tokens/s | speed vs plain |",
    "|---|---|---|---:|---:|---:|---:|---:|",
)
_FACTS = ("device", "dtype", "max_new_tokens", "loop")


def evaluation_results(path: Path, state: CheckpointState, checkpoint: str) -> str:
    """The results in a report of `slipstream eval`, as Markdown.

    Args:
        path: JSON that `slipstream eval --output` wrote.
        state: of the checkpoint that is exported.
        checkpoint: its directory's name.

    Raises:
        SlipstreamError: DATA_INVALID, no such report, or one of another checkpoint.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        settings = report["settings"]
        found = (settings["run"], settings["checkpoint"])
        text = _in_words(report)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        what = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise _invalid(
            f"{path} is no report of an evaluation ({what})",
            "Give the file that `slipstream eval … --output FILE` of this version wrote.",
        ) from error
    if found != (state.run, checkpoint):
        raise _invalid(
            f"{path} measured {found[1]} of run {found[0]}, expected {checkpoint} of run {state.run}",
            "Give the report of the checkpoint that is exported, or leave --eval out.",
        )
    return text


def heldout_results(state: CheckpointState) -> str | None:
    """What was estimated while the run trained; None where nothing was."""
    measured = state.heldout
    if measured is None:
        return None
    rows = [markdown_row((source, f"{length:.3f}")) for source, length in measured.by_source.items()]
    table = ["| source | accepted length (bonus included) |", "|---|---:|", *rows]
    return "\n".join(
        [*table, f"| all | {measured.accepted_length:.3f} |", "", "Held-out answers, walked as decoding goes."]
    )


def _in_words(report: dict[str, Any]) -> str:
    rows = [
        (Setting(one["batch_size"], one["temperature"]).in_words(), label, source, *row_in_words(row))
        for one in report["by_setting"]
        for label, by_source in one["results"].items()
        for source, row in shown_sources(by_source).items()
    ]
    settings = report["settings"]
    facts = ", ".join(f"{name.replace('_', ' ')} {settings[name]}" for name in _FACTS)
    closing = [
        f"By `slipstream eval`: {facts}. Accepted length counts the bonus token; intervals: {report['intervals']}.",
        *positions_in_words(report),
        *part_batches_in_words(report),
        *losslessness_in_words(report),
        *answers_in_words(report),
    ]
    if not settings["target_verified"]:
        closing.append("**The target that decoded was not shown to be the one that the drafter was trained for.**")
    table = [*_TITLES, *map(markdown_row, rows)]
    return "\n".join([*table, "", *(f"- {line.strip()}" for line in closing)])


def _invalid(message: str, remedy: str) -> SlipstreamError:
    return SlipstreamError(message, reason=Reason.DATA_INVALID, remedy=remedy)
