"""⑥ What the ledger refuses: other terms than before, a group that does not fit, cursors and commits that cannot be."""

import json
from collections.abc import Iterable

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from target_server.subscription import Start, Subscription, SubscriptionRecord, SubscriptionTerms

_FARTHEST_CURSOR = 2**48
_LARGEST_INCARNATION = 2**48
_MOST_SKIPPED_STEPS = 1_000_000


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


def check_cursor(subscription: Subscription, first_sequence_number: int, next_step: int, horizon: int | None) -> None:
    """A cursor lies inside the run's stream.

    Args:
        subscription: the run's.
        first_sequence_number: the pack that step 0 begins with.
        next_step: the first step to come.
        horizon: where the cursor may be at most in a stream that repeats; None: anywhere.

    Raises:
        SlipstreamError: SPEC_INVALID.
    """
    if next_step < 0 or first_sequence_number < 0:
        raise SlipstreamError(
            f"A cursor is not negative: step {next_step}, first pack {first_sequence_number}.",
            reason=Reason.SPEC_INVALID,
        )
    name, packs_per_step = subscription.record.name, subscription.record.terms.packs_per_step
    boundary = first_sequence_number + next_step * packs_per_step
    end = subscription.end
    if end is None:
        farthest = _FARTHEST_CURSOR if horizon is None else horizon
    else:
        farthest = min(end, subscription.limit_from(first_sequence_number, end))
    if boundary > farthest:
        raise SlipstreamError(
            f"Step {next_step} of {name} would begin at pack {boundary}; its stream ends at pack {farthest}.",
            reason=Reason.SPEC_INVALID,
            remedy="Resume from a checkpoint of this run, on the data and for the epochs it was begun with.",
        )


def check_lineage(incarnation: int) -> None:
    """The number of an incarnation that was.

    Raises:
        SlipstreamError: SPEC_INVALID.
    """
    if not 0 <= incarnation < _LARGEST_INCARNATION:
        raise SlipstreamError(f"There was no incarnation {incarnation}.", reason=Reason.SPEC_INVALID)


def check_skipped(record: SubscriptionRecord, steps: int) -> None:
    """A seek may skip steps whose commits were lost; not more than can be written in one go.

    Raises:
        SlipstreamError: SPEC_INVALID.
    """
    if steps > _MOST_SKIPPED_STEPS:
        raise SlipstreamError(
            f"The cursor is {steps} steps after the last that {record.name} has committed; at most "
            f"{_MOST_SKIPPED_STEPS} can be made good.",
            reason=Reason.SPEC_INVALID,
            remedy="Use the ledger that the run was trained with, or an empty one.",
        )


def check_commit(step: int, subscription: Subscription) -> None:
    """Only what was handed out can have been trained, and no step comes before the one that precedes it.

    Raises:
        SlipstreamError: SPEC_INVALID; LEASE_LOST when only an earlier server process can know.
    """
    name = subscription.record.name
    if step < 0:
        raise SlipstreamError(f"There is no step {step}.", reason=Reason.SPEC_INVALID)
    if subscription.restored and step > subscription.record.next_step:
        raise SlipstreamError(
            f"Step {step} of {name} was handed out by an earlier server process, whose ledger has lost the steps from "
            f"{subscription.record.next_step} on.",
            reason=Reason.LEASE_LOST,
            remedy="Seek: steps before the cursor count as committed.",
        )
    if not subscription.handed_out(step):
        packs = subscription.packs_of(step)
        raise SlipstreamError(
            f"Step {step} of {name} cannot be done: it trains packs {packs.start} to {packs.stop - 1}, and only those "
            f"before {subscription.fresh} were handed out.",
            reason=Reason.SPEC_INVALID,
            remedy="Commit a step once its packs are read and confirmed; seek after the connection was lost.",
        )
    if step > subscription.record.next_step:
        raise SlipstreamError(
            f"Step {step} of {name} cannot be done: step {subscription.record.next_step} is not committed.",
            reason=Reason.SPEC_INVALID,
            remedy="Commit the steps in order; what is committed already may be committed again.",
        )


def _data_differences(old: str, new: str) -> list[str]:
    before, after = json.loads(old), json.loads(new)
    keys = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key) and key != "files")
    if not keys:
        return ["the content of the conversation files has changed"]
    return [f"data.{key} was {before.get(key)}, is {after.get(key)}" for key in keys]
