"""What the API says of a run, in the words that all commands use."""

from collections.abc import Mapping
from typing import Any

from slipstream.cli.display import ABSENT, duration, measure, percent
from slipstream.run_spec.states import Condition

Json = Mapping[str, Any]
_STANDS_STILL = (
    Condition.NO_TRAINER_FITS,
    Condition.TARGET_UNREACHABLE,
    Condition.PACKS_HELD_BACK,
    Condition.TRAINER_LOST,
)
_TOLD = ("step", "trainer", "reason")
"""What is told of an event that has no message."""


def accepted_length(record: Json) -> str:
    """The estimate while training: leading right tokens per block, with the bonus token that decoding adds."""
    return measure(record.get("mean_matched_prefix_with_bonus"), 2)


def heldout_length(measured: Json | None) -> str:
    """Accepted length on held-out answers, over all sources."""
    return measure((measured or {}).get("accepted_length"))


def heldout_words(measured: Json | None) -> str:
    """`1.285 at step 400 (chat 1.300, code 1.315)`."""
    if measured is None:
        return ""
    sources = sources_words(measured)
    return f"{heldout_length(measured)} at step {measured['step']}" + (f" ({sources})" if sources else "")


def data_words(data: Json | None) -> str:
    """`97 of 100 records, 3 dropped`, and a line for each reason; what is known of it."""
    if data is None:
        return ""
    apart = f", {data['other_split']:,} of the other split" if data["other_split"] else ""
    lines = [f"{data['used']:,} of {data['read']:,} records used{apart}, {data['num_dropped']:,} dropped"]
    for one in data["dropped"]:
        more = ", …" if one["count"] > len(one["examples"]) else ""
        lines.append(f"dropped {one['count']:,}: {one['words']} ({', '.join(one['examples'])}{more})")
    return "\n".join(lines)


def sources_words(measured: Json) -> str:
    """`chat 1.300, code 1.315`."""
    return ", ".join(f"{source} {measure(length)}" for source, length in sorted(measured["by_source"].items()))


def steps(progress: Json) -> str:
    """`42/400`; `42` while the total is not known."""
    total = progress["max_steps"]
    return f"{progress['step']}/{total}" if total is not None else str(progress["step"])


def progress_words(run: Json) -> str:
    """`step 42/400 (10.5%), loss 3.214, accepted length 1.23, 1,234 tokens/s, ETA 3m 12s`; what is known of it."""
    progress, record = run["progress"], run["latest_metrics"] or {}
    words = f"step {steps(progress)}"
    if progress["fraction"] is not None:
        words += f" ({percent(progress['fraction'])})"
    known = {
        "loss ": measure(record.get("loss")),
        "accepted length ": accepted_length(record),
        "held out ": heldout_length((run.get("heldout") or {}).get("latest")),
        "tokens/s ": pace(run),
        "ETA ": duration(progress["eta_seconds"]),
    }
    halt = standstill(run)
    if halt is not None:
        known |= {"tokens/s ": ABSENT, "ETA ": ABSENT, "": halt}
    return ", ".join([words, *(name + value for name, value in known.items() if value != ABSENT)])


def pace(run: Json) -> str:
    """Tokens that its trainer trains in a second; `-` while it stands still, whatever was measured before."""
    throughput = run["throughput"] or {}
    return ABSENT if standstill(run) else measure(throughput.get("trainer_tokens_per_second"), 0)


def time_left(run: Json) -> str:
    """The time to its end, or the condition that it stands still with."""
    return standstill(run) or duration(run["progress"]["eta_seconds"])


def standstill(run: Json) -> str | None:
    """The condition with which nothing is trained; None where there is none."""
    return next((one["type"] for one in run["conditions"] if one["type"] in _STANDS_STILL), None)


def unfit(run: Json) -> str | None:
    """Why none of the trainers that are there can train the run, and what to do; None where one can."""
    return next((one["message"] for one in run["conditions"] if one["type"] == Condition.NO_TRAINER_FITS), None)


def step_back(before: Json | None, record: Json) -> str | None:
    """What is to say where another training process begins before the step that the last one had reached."""
    if before is None or record["incarnation"] == before["incarnation"] or record["step"] > before["step"]:
        return None
    step = record["step"]
    return f"goes on from step {step} (last checkpoint)" if step else "begins again: there was no checkpoint yet"


def with_record(run: Json, record: Json) -> dict[str, Any]:
    """The run after one more record of its metrics, as far as that is known without asking."""
    step = record["step"] + 1
    total = run["progress"]["max_steps"]
    progress = dict(run["progress"]) | {
        "step": step,
        "fraction": min(1.0, step / total) if total else None,
        "eta_seconds": _number(record.get("eta_seconds")),
    }
    measured = _number(record.get("tokens_per_second"))
    throughput = dict(run["throughput"] or {})
    if measured is not None:
        throughput["trainer_tokens_per_second"] = measured
    changed = {"progress": progress, "latest_metrics": record, "throughput": throughput or None}
    length = _number(record.get("heldout_accepted_length"))
    if length is not None:
        changed["heldout"] = {"latest": {"step": step, "accepted_length": length, "by_source": {}}}
    return dict(run) | changed


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def event_words(event: Json) -> str:
    """An event without its time."""
    data, message = event["data"], event["message"]
    if event["type"] == "STATE_CHANGED":
        words = f"{data['state']} ({data['cause']})"
    elif event["type"] == "CONDITION_CHANGED":
        words = data["condition"] if data["holds"] else f"{data['condition']} is over"
    else:
        told = " ".join(f"{key}={data[key]}" for key in _TOLD if data.get(key) is not None and not message)
        words = f"{event['type']} {told}".rstrip()
    source = "" if event["source"] == "control-api" else f"{event['source']}: "
    return f"{source}{words}: {message}" if message else f"{source}{words}"


class Telling:
    """What is told of one run, one thing after another: a failure is an event of its process, then one of the run, and
    then its end, and the message of all three is said once."""

    def __init__(self) -> None:
        self._said = self._before = ""
        """The last message, and that of the last event: what comes again after something else is told again."""

    def event(self, event: Json) -> str:
        """As `event_words`."""
        message, before = event["message"], self._before
        self._said, self._before = message or self._said, message
        return event_words(_without_message(event) if message == before else event)

    def state(self, run: Json) -> str:
        """As `state_words`."""
        message, said = run["message"], self._said
        self._said = message or said
        return state_words(_without_message(run) if message == said else run)


def _without_message(told: Json) -> Json:
    return dict(told) | {"message": ""}


def state_words(run: Json) -> str:
    """The state, with what explains it: the reason of a failure, the conditions."""
    lines = [run["state"]]
    if run["state"] == "FAILED":
        lines = [f"FAILED {run['reason'] or ''}".strip(), *([run["message"]] if run["message"] else [])]
    return "\n".join([*lines, *(f"{one['type']}: {one['message']}" for one in run["conditions"])])
