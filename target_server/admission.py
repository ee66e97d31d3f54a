"""⑥ Whether a run may subscribe: same terms as before, a group that fits, a start inside the stream."""

import json
from collections.abc import Iterable

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from target_server.subscription import Start, Subscription, SubscriptionRecord, SubscriptionTerms


def check_same_run(record: SubscriptionRecord, terms: SubscriptionTerms, stream: str, fingerprint: str) -> None:
    """A run that comes back must want what it wanted. Where its files lie may differ, their content may not.

    Raises:
        SlipstreamError: TARGET_FINGERPRINT_MISMATCH, STREAM_CHANGED.
    """
    if record.fingerprint != fingerprint:
        raise SlipstreamError(
            f"Run {terms.run} was opened on target {record.fingerprint}; this server's target is {fingerprint}.",
            reason=Reason.TARGET_FINGERPRINT_MISMATCH,
            remedy="Serve the model, revision and dtype the run began with, or choose another run name.",
        )
    old = record.terms
    differences = [
        f"{name} was {getattr(old, name)}, is {getattr(terms, name)}"
        for name in ("layer_ids", "last_hidden_state", "packs_per_step")
        if getattr(old, name) != getattr(terms, name)
    ]
    if record.stream != stream:
        differences += _data_differences(old.data_spec_json, terms.data_spec_json)
    if differences:
        raise SlipstreamError(
            f"Run {terms.run} was opened differently: {'; '.join(differences)}.",
            reason=Reason.STREAM_CHANGED,
            remedy="Restore the recipe and the data the run began with, or choose another run name.",
        )


def check_group(terms: SubscriptionTerms, stream: str, others: Iterable[Subscription]) -> None:
    """A group names one stream and one size.

    Args:
        terms: of the run that wants to join.
        stream: its stream.
        others: the other runs that are present.

    Raises:
        SlipstreamError: SPEC_INVALID.
    """
    if terms.start is not Start.GROUP:
        return
    if not terms.group or terms.group_size < 1:
        raise SlipstreamError("A start in a group needs a group name and a size.", reason=Reason.SPEC_INVALID)
    for other in others:
        if other.record.terms.group != terms.group or other.record.terms.start is not Start.GROUP:
            continue
        if other.record.terms.group_size != terms.group_size:
            raise SlipstreamError(
                f"Group {terms.group!r} has size {other.record.terms.group_size} for run {other.record.terms.run}, "
                f"and {terms.group_size} for run {terms.run}.",
                reason=Reason.SPEC_INVALID,
                remedy="Give all members the same stream.group_size, or another stream.group.",
            )
        if other.record.stream != stream:
            raise SlipstreamError(
                f"Group {terms.group!r}: run {terms.run} and run {other.record.terms.run} have different data.",
                reason=Reason.SPEC_INVALID,
                remedy="Members of a group share one [data] table; runs on other data need another stream.group.",
            )


def check_live_start(first_sequence_number: int, end: int | None, terms: SubscriptionTerms) -> None:
    """A live start must leave something to train.

    Raises:
        SlipstreamError: SPEC_INVALID.
    """
    if end is not None and end - first_sequence_number < terms.packs_per_step:
        raise SlipstreamError(
            f"The stream is at pack {first_sequence_number}; {terms.max_epochs} epochs end at pack {end}.",
            reason=Reason.SPEC_INVALID,
            remedy="Start at the beginning, or train for more epochs.",
        )


def _data_differences(old: str, new: str) -> list[str]:
    before, after = json.loads(old), json.loads(new)
    keys = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key) and key != "files")
    if not keys:
        return ["the content of the conversation files has changed"]
    return [f"data.{key} was {before.get(key)}, is {after.get(key)}" for key in keys]
