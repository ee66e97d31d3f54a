"""An operator's word to a target server: drain it, hold one run's packs back, give them again."""

from collections.abc import Callable

from slipstream.errors import SlipstreamError
from slipstream.hidden_states.v1 import stream_admin_service_pb2 as pb
from slipstream.run_spec.reasons import Reason
from slipstream.wire.ask_once import order_to
from slipstream.wire.channel import TargetClient

_NOT_READ = (Reason.SUBSCRIPTION_UNKNOWN, Reason.STREAM_CLOSED)
_NOT_NOW = (Reason.TARGET_UNREACHABLE, Reason.LEDGER_UNWRITABLE)


class TargetOrders:
    """Each is sent once; the target has done it when the call returns.

    It may have done it when the call raises TARGET_UNREACHABLE, too: all of them may be given again.
    """

    def __init__(self, address: str, *, token: str | None, deadline: float) -> None:
        """`deadline`: seconds after which no answer is an answer."""
        self._address = address
        self._token = token
        self._deadline = deadline

    def drain(self) -> None:
        """Lease and compute nothing more, until the server is started again.

        Raises:
            SlipstreamError: TARGET_UNREACHABLE, LEDGER_UNWRITABLE, TARGET_INCOMPATIBLE.
        """
        self._give(lambda client: client.drain_target(pb.DrainTargetRequest()))

    def hold_back(self, subscription: str) -> None:
        """Give a run no packs; its trainer waits.

        Raises:
            SlipstreamError: as `drain`; SUBSCRIPTION_UNKNOWN, the run reads nothing there.
        """
        self._give(lambda client: client.pause_subscription(pb.PauseSubscriptionRequest(subscription=subscription)))

    def give_again(self, subscription: str) -> None:
        """Undo `hold_back`.

        Raises:
            SlipstreamError: as `hold_back`.
        """
        self._give(lambda client: client.resume_subscription(pb.ResumeSubscriptionRequest(subscription=subscription)))

    def _give(self, order: Callable[[TargetClient], object]) -> None:
        try:
            with order_to(self._address, token=self._token, deadline=self._deadline) as client:
                order(client)
        except SlipstreamError as error:
            if error.reason in _NOT_READ:
                raise SlipstreamError(
                    f"The run reads nothing at the target server at {self._address}.",
                    reason=Reason.SUBSCRIPTION_UNKNOWN,
                    remedy="Packs are held back of a run whose trainer has begun to read them, and has not ended.",
                ) from error
            if error.reason in _NOT_NOW:
                raise
            raise SlipstreamError(error.message, reason=Reason.TARGET_INCOMPATIBLE, remedy=error.remedy) from error
