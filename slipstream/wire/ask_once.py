"""Asking a target server once: where a trainer would wait, an operator is told why."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.wire.channel import TargetClient, WaitInterruptedError


@contextmanager
def asked_once(
    address: str, *, token: str | None, deadline: float | None = None
) -> Iterator[tuple[TargetClient, Sequence[Reason]]]:
    """A target server that is asked once: where a trainer would wait, a call raises WaitInterruptedError.

    Args:
        address: of the server.
        token: of the server.
        deadline: seconds after which a call that is under way ends so, too; without one, after the client's own.

    Yields:
        The client, and for what it was about to wait; nothing after `deadline`.

    Raises:
        SlipstreamError: SPEC_INVALID, this is no address.
    """
    waits: list[Reason] = []
    stop = threading.Event()

    def give_up(reason: Reason, _seconds: float) -> None:
        waits.append(reason)
        stop.set()

    with TargetClient(address, token=token, on_wait=give_up, stop=stop) as client:
        too_late = None if deadline is None else threading.Timer(deadline, client.close)
        if too_late is not None:
            too_late.daemon = True
            too_late.start()
        try:
            yield client, waits
        finally:
            if too_late is not None:
                too_late.cancel()


@contextmanager
def order_to(address: str, *, token: str | None, deadline: float | None = None) -> Iterator[TargetClient]:
    """A target server that is given one order; the arguments are those of `asked_once`.

    Raises:
        SlipstreamError: LEDGER_UNWRITABLE, nothing was changed; TARGET_UNREACHABLE, which says whether that is known;
            what the server refused the order with; SPEC_INVALID, this is no address.
    """
    waits: Sequence[Reason] = ()
    try:
        with asked_once(address, token=token, deadline=deadline) as (client, waits):
            yield client
    except WaitInterruptedError as error:
        raise _unanswered(address, waits[0] if waits else None, deadline) from error


def _unanswered(address: str, reason: Reason | None, deadline: float | None) -> SlipstreamError:
    if reason is Reason.LEDGER_UNWRITABLE:
        return SlipstreamError(
            f"The target server at {address} cannot write its ledger now: nothing was changed.",
            reason=Reason.LEDGER_UNWRITABLE,
            remedy="Its log says why (a full disk, or another program's lock): mend that, then try again.",
        )
    if reason is Reason.TARGET_LOADING:
        return SlipstreamError(
            f"The target server at {address} is loading its model: nothing was changed.",
            reason=Reason.TARGET_UNREACHABLE,
            remedy="Try again once it serves.",
        )
    # The order may have arrived, and only the answer not.
    within = f" within {deadline:g} s" if reason is None and deadline is not None else ""
    return SlipstreamError(
        f"The target server at {address} does not answer{within}: whether the order was carried out is not known.",
        reason=Reason.TARGET_UNREACHABLE,
        remedy="If it runs at this address, give the order again once it answers: to give it twice does no harm.",
    )
