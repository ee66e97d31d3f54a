"""One visit to a target server: can it serve, how fast is it, and what it is to forget."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from pydantic import ValidationError

from control_api.schemas import TargetStatus
from slipstream.errors import SlipstreamError
from slipstream.hidden_states.v1 import hidden_state_service_pb2 as pb
from slipstream.hidden_states.v1 import stream_admin_service_pb2 as admin_pb
from slipstream.plan.target_sizes import sizes_of_served
from slipstream.run_spec.reasons import Reason
from slipstream.telemetry.logs import log_event
from slipstream.wire.ask_once import asked_once
from slipstream.wire.channel import TargetClient, WaitInterruptedError
from slipstream.wire.target_config import TargetConfig

Done = TypeVar("Done")

_log = logging.getLogger(__name__)

_STATUS_OF_WAIT: dict[Reason, TargetStatus] = {
    Reason.TARGET_LOADING: "LOADING",
    Reason.TARGET_DRAINING: "DRAINING",
}


@dataclass(frozen=True)
class Errands:
    """What to do at a target that answers; names of subscriptions."""

    close: Sequence[str] = ()
    measure: Sequence[str] = ()


@dataclass(frozen=True)
class StreamStats:
    """What a target says of the stream of a subscription."""

    tokens_per_second: float
    """Computed for the stream in the last half minute; 0 while less than two packs were."""
    wait_seconds: float
    """In which the subscription's trainers waited for packs to be computed; grows."""
    serving_seconds: float
    """Since the first lease; grows, and shrinks when the server is another process."""
    is_held_back: bool = False
    """An operator lets the run have no packs."""


@dataclass(frozen=True)
class Finding:
    """What a target said."""

    status: TargetStatus
    detail: str = ""
    model: str | None = None
    revision: str | None = None
    fingerprint: str | None = None
    server_version: str | None = None
    sizes: Mapping[str, Any] | None = None
    """Of its model; None where a server of another version says them otherwise."""
    closed: frozenset[str] = frozenset()
    """Subscriptions that it has closed, or does not have."""
    stats: Mapping[str, StreamStats] = field(default_factory=dict)
    """By subscription; without those that it does not have."""


def visit(address: str, errands: Errands = Errands(), *, token: str | None, deadline: float) -> Finding:
    """The handshake, then the errands; takes at most `deadline` seconds and never tries twice.

    What there was no time for is left for the next visit.
    """
    waits: Sequence[Reason] = ()
    try:
        with asked_once(address, token=token, deadline=deadline) as (client, waits):
            target = client.get_target()
            closed = _each(errands.close, lambda name: _close(client, name))
            stats = _each(errands.measure, lambda name: _measure(client, name))
    except WaitInterruptedError:
        return _absent(waits, address, deadline)
    except SlipstreamError as error:
        return Finding("INCOMPATIBLE", str(error))
    return Finding(
        "REACHABLE",
        model=target.model_id,
        revision=target.model_revision or None,
        fingerprint=target.target_fingerprint,
        server_version=target.server_version,
        sizes=_sizes(target),
        closed=frozenset(closed),
        stats=stats,
    )


def _sizes(target: pb.GetTargetResponse) -> dict[str, Any] | None:
    try:
        return asdict(sizes_of_served(TargetConfig.from_json(target.target_config_json)))
    except ValidationError as error:
        what = f"{error.error_count()} keys are missing, unknown or of another type"
        log_event(_log, "debug", "target_sizes_unknown", model=target.model_id, detail=what)
        return None


def _absent(waits: Sequence[Reason], address: str, deadline: float) -> Finding:
    """Of a target that cannot be used now, for the first of these reasons."""
    if not waits:
        return Finding("UNREACHABLE", f"No answer from {address} within {deadline:g} s.")
    status = _STATUS_OF_WAIT.get(waits[0], "UNREACHABLE")
    words = {"LOADING": "is loading its model.", "DRAINING": "is draining: it computes nothing more."}
    return Finding(status, f"The target server at {address} {words.get(status, 'does not answer.')}")


def _each(names: Sequence[str], errand: Callable[[str], Done | None]) -> dict[str, Done]:
    """What came of the errand for each name; without those that failed or that there was no time for."""
    done: dict[str, Done] = {}
    for name in names:
        try:
            result = errand(name)
        except WaitInterruptedError:
            break
        except SlipstreamError as error:
            # An older server perhaps; it serves nevertheless.
            log_event(_log, "warning", "target_errand_failed", subscription=name, error=str(error))
            continue
        if result is not None:
            done[name] = result
    return done


def _close(client: TargetClient, name: str) -> bool:
    try:
        client.close_subscription(admin_pb.CloseSubscriptionRequest(subscription=name))
    except SlipstreamError as error:
        if error.reason is not Reason.SUBSCRIPTION_UNKNOWN:  # never opened, or a server with a new ledger
            raise
    return True


def _measure(client: TargetClient, name: str) -> StreamStats | None:
    try:
        found = client.get_stream_stats(admin_pb.GetStreamStatsRequest(subscription=name))
    except SlipstreamError as error:
        if error.reason not in (Reason.SUBSCRIPTION_UNKNOWN, Reason.STREAM_CLOSED):  # its trainer has not come yet
            raise
        return None
    own = [one for one in found.subscriptions if one.subscription == name]
    if not own:
        return None
    return StreamStats(
        tokens_per_second=found.target_tokens_per_second,
        wait_seconds=own[0].trainer_wait_seconds,
        serving_seconds=own[0].serving_seconds,
        is_held_back=own[0].paused,
    )
