"""The result of an evaluation as JSON, and its parts in words for people."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drafter_trainer.evaluation.compare import Comparison, Tally
from drafter_trainer.evaluation.decode import Decoded
from drafter_trainer.evaluation.intervals import COVERAGE, RESAMPLES, SEED, intervals
from drafter_trainer.evaluation.losslessness import Difference
from drafter_trainer.evaluation.samples import pieces
from drafter_trainer.evaluation.setting import PLAIN, TRAINED, Setting
from slipstream.data_answers import REMEDY
from slipstream.errors import SlipstreamError
from slipstream.eval_prompts import Prompt
from slipstream.run_spec.reasons import Reason

LOW_ACCEPTED_LENGTH = 1.1
"""Below it a drafter is as good as none."""
_SHOWN_DIFFERENCES = 20


def total(tallies: dict[str, Tally]) -> Tally:
    """All sources of one way of decoding together, every round with the same weight."""
    whole = Tally()
    for tally in tallies.values():
        whole.prompts += tally.prompts
        whole.tokens += tally.tokens
        whole.seconds += tally.seconds
        whole.emitted += tally.emitted
        whole.by_prompt += tally.by_prompt
        counts = whole.accepted_at or [0] * len(tally.accepted_at)
        whole.accepted_at = [a + b for a, b in zip(counts, tally.accepted_at, strict=True)]
    return whole


def to_dict(comparisons: Mapping[Setting, Comparison], settings: dict[str, Any]) -> dict[str, Any]:
    """JSON-ready report; None stands where there is no number: no verification round, an output that ended.

    The first setting's results stand at the top, all settings' in `by_setting`.
    """
    by_setting = [_setting(setting, comparison) for setting, comparison in comparisons.items()]
    greedy = [found for setting, found in zip(comparisons, by_setting, strict=True) if setting.greedy]
    return {
        "settings": settings,
        "accepted_length_counts": "accepted drafts + 1 bonus token, per verification round",
        "intervals": f"{COVERAGE:.0%}, bootstrap over prompts, {RESAMPLES} resamples, seed {SEED}",
        "results": by_setting[0]["results"],
        "lossless": all(found["lossless"] for found in greedy),
        "differences": (greedy or by_setting)[0]["differences"],
        "by_setting": by_setting,
        "samples": [
            _sample(setting, label, prompt, decoded)
            for setting, comparison in comparisons.items()
            for label, kept in comparison.samples.items()
            for prompt, decoded in kept
            if decoded.texts
        ],
    }


def _sample(setting: Setting, label: str, prompt: Prompt, decoded: Decoded) -> dict[str, Any]:
    return {
        "setting": setting.in_words(),
        "decoding": label,
        "source": prompt.source,
        "prompt": prompt.id,
        "question": prompt.messages[-1]["content"],
        "pieces": pieces(decoded),
    }


def _setting(setting: Setting, comparison: Comparison) -> dict[str, Any]:
    plain = _with_total(comparison.tallies[PLAIN])
    return {
        "batch_size": setting.batch_size,
        "temperature": setting.temperature,
        "results": {
            label: {source: _row(tally, plain[source]) for source, tally in _with_total(by_source).items()}
            for label, by_source in comparison.tallies.items()
        },
        # Samples differ by chance; that their distribution is the target's is a property of the rule.
        "lossless": comparison.lossless if setting.greedy else None,
        "differences": {label: [_difference(d) for d in found] for label, found in comparison.differences.items()},
    }


def _with_total(by_source: dict[str, Tally]) -> dict[str, Tally]:
    return {**by_source, "all": total(by_source)}


def _row(tally: Tally, plain: Tally) -> dict[str, Any]:
    found = intervals(tally.by_prompt, plain.by_prompt)
    return {
        "prompts": tally.prompts,
        "tokens": tally.tokens,
        "rounds": tally.rounds,
        "accepted_length": _finite(tally.accepted_length),
        "acceptance_by_position": tally.acceptance_by_position,
        "tokens_per_second": _finite(tally.tokens_per_second),
        # Without a token behind the prefill's there is no speed to compare with.
        "speed_ratio_to_plain": _finite(tally.tokens_per_second / plain.tokens_per_second) if plain.tokens else None,
        **{f"{name}_interval": interval for name, interval in found.items()},
    }


def _difference(difference: Difference) -> dict[str, Any]:
    return difference.to_dict() | {"top_two_gap": _finite(difference.top_two_gap)}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def as_json(report: dict[str, Any]) -> str:
    """The report for programs, one document."""
    return json.dumps(report, indent=2, allow_nan=False) + "\n"


def write_text(path: Path, text: str) -> None:
    """Write a file of the report.

    Raises:
        SlipstreamError: PATH_NOT_ALLOWED, the file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SlipstreamError(
            f"the report cannot be written to {path}: {error.strerror}",
            reason=Reason.PATH_NOT_ALLOWED,
            remedy="Give --output a file, or --report a directory, that you may write to.",
        ) from error


def shown_sources(by_source: dict[str, Any]) -> dict[str, Any]:
    """All sources and their total; the total alone where there is one source."""
    return by_source if len(by_source) > 2 else {"all": by_source["all"]}


def row_in_words(row: dict[str, Any]) -> tuple[str, ...]:
    """Prompts, tokens, accepted length, tokens/s, speed vs plain, with intervals where there are any."""
    return (
        str(row["prompts"]),
        str(row["tokens"]),
        _shown(row["accepted_length"], ".3f") + _spread(row["accepted_length_interval"], ".2f"),
        _shown(row["tokens_per_second"], ".1f"),
        _shown(row["speed_ratio_to_plain"], ".2f", "x") + _spread(row["speed_ratio_to_plain_interval"], ".2f"),
    )


def _spread(interval: Sequence[float] | None, form: str) -> str:
    """Nothing where the number cannot move: plain decoding against itself."""
    if interval is None or interval[0] == interval[1]:
        return ""
    return f" [{interval[0]:{form}}, {interval[1]:{form}}]"


def shares_in_words(shares: Sequence[float]) -> tuple[str, ...]:
    """Acceptance by position, from the first draft on."""
    return tuple(f"{share:.0%}" for share in shares)


def positions_in_words(report: dict[str, Any]) -> list[str]:
    """Acceptance by position over all sources, for each setting and drafter."""
    return [
        f"Acceptance by position, {label}, {Setting(found['batch_size'], found['temperature']).in_words()}: "
        + " ".join(shares_in_words(shares))
        for found in report["by_setting"]
        for label, by_source in found["results"].items()
        if (shares := by_source["all"]["acceptance_by_position"])
    ]


def part_batches_in_words(report: dict[str, Any]) -> list[str]:
    """Batches that were not full are no measurement of how many tokens such a batch gives in a second."""
    lines = []
    for size in sorted({found["batch_size"] for found in report["by_setting"]}):
        by_source = report["by_setting"][0]["results"][PLAIN]
        sources = [source for source, row in by_source.items() if source != "all" and row["prompts"] % size]
        if sources:
            lines.append(
                f"Batch {size} was not always full ({', '.join(sources)}): its empty rows took time and gave no "
                "tokens, plainly and drafted alike, so that tokens/s is below what full ones reach."
            )
    return lines


def title_in_words(report: dict[str, Any]) -> str:
    """Which drafter was measured."""
    return f"Speculative decoding: {report['settings']['run']}, {report['settings']['checkpoint']}"


def loop_in_words(report: dict[str, Any]) -> str:
    """What decoded, the same for every way of decoding."""
    settings = report["settings"]
    return f"Decoded in {settings['dtype']} over {settings['loop']}, intervals: {report['intervals']}."


def target_in_words(settings: dict[str, Any]) -> str:
    """Whether these are numbers of the drafter with its own target."""
    if settings["target_verified"]:
        return "Target verified: its files are those that the drafter was trained with."
    if settings["target_verified"] is None:
        return f"Target not verified: the drafter's files do not say whether {settings['target']} is theirs."
    return f"Target not verified: {settings['target']} is another one than the drafter was trained for, as allowed."


def answers_in_words(report: dict[str, Any]) -> list[str]:
    """Whether the drafter learned another model's answers; where nothing says whose they were, only if it looks so."""
    found = report["settings"].get("unproven_answers")
    if found is None:
        return []
    if found["written_by"] is not None:
        return [
            f"Learned from another model's answers: {found['written_by']} wrote {found['file']}, not the target. "
            f"Drafts are then accepted less, down to about 1.0. {REMEDY}"
        ]
    lengths = [one["results"][TRAINED]["all"]["accepted_length"] for one in report["by_setting"]]
    if any(length is None or length >= LOW_ACCEPTED_LENGTH for length in lengths):
        return []
    return [
        f"Accepted length is about 1.0: hardly trained, or trained on answers that the target did not write (nothing "
        f"shows who wrote {found['file']}). {REMEDY}"
    ]


def _shown(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def losslessness_in_words(report: dict[str, Any]) -> list[str]:
    """What the comparison with plain decoding found, for each greedy setting."""
    lines = []
    for found in report["by_setting"]:
        setting = Setting(found["batch_size"], found["temperature"])
        if setting.greedy:
            named = f"{setting.in_words()}: " if len(report["by_setting"]) > 1 else ""
            differences = [d for ds in found["differences"].values() for d in ds]
            lines += _differences_in_words(named, differences, report["settings"])
    return lines or ["Losslessness was not compared: no setting is greedy."]


def _differences_in_words(named: str, found: list[dict[str, Any]], settings: dict[str, Any]) -> list[str]:
    if not found:
        return [f"{named}Lossless: every output equals plain greedy decoding token for token."]
    errors = [d for d in found if not d["allowed"]]
    # Errors first: they must be seen.
    shown = sorted(found, key=lambda d: bool(d["allowed"]))[:_SHOWN_DIFFERENCES]
    lines = [
        f"{named}Outputs that differ from plain decoding ({settings['dtype']}): {len(found)}; allowed where the "
        f"target's two largest logits are at most {settings['gap_bound']} apart: {len(found) - len(errors)}, "
        f"not allowed: {len(errors)}."
    ]
    lines += [
        f"  {d['prompt']} at token {d['position']}: plain {d['plain_token']}, speculative {d['speculative_token']}, "
        f"top-two gap {_shown(d['top_two_gap'], '.4f')}{'' if d['allowed'] else '  ← error'}"
        for d in shown
    ]
    if len(found) > len(shown):
        lines.append(f"  and {len(found) - len(shown)} more, all of them in the JSON")
    return lines
