"""An operator's word to a target server: drain it, hold one run's packs back, give them again."""

from collections.abc import Callable

from control_api.target_visit import absent, called
from slipstream.errors import SlipstreamError
from slipstream.hidden_states.v1 import stream_admin_service_pb2 as pb
from slipstream.run_spec.reasons import Reason
from slipstream.wire.channel import TargetClient, WaitInterruptedError

_NOT_READ = (Reason.SUBSCRIPTION_UNKNOWN, Reason.STREAM_CLOSED)


class TargetOrders:
    """Each is sent once; the target has done it when the call returns. All of them may be given again."""

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
            with called(self._address, token=self._token, deadline=self._deadline) as (client, waits):
                order(client)
        except WaitInterruptedError as error:
            if waits[:1] == [Reason.LEDGER_UNWRITABLE]:
                raise SlipstreamError(
                    f"The target server at {self._address} cannot write its ledger now: nothing was changed.",
                    reason=Reason.LEDGER_UNWRITABLE,
                    remedy="Its log says why (a full disk, or another program's lock): mend that, then try again.",
                ) from error
            raise SlipstreamError(
                f"{absent(waits, self._address, self._deadline).detail} Nothing was changed.",
                reason=Reason.TARGET_UNREACHABLE,
                remedy="Try again once it answers.",
            ) from error
        except SlipstreamError as error:
            if error.reason in _NOT_READ:
                raise SlipstreamError(
                    f"The run reads nothing at the target server at {self._address}.",
                    reason=Reason.SUBSCRIPTION_UNKNOWN,
                    remedy="Packs are held back of a run whose trainer has begun to read them, and has not ended.",
                ) from error
            raise SlipstreamError(error.message, reason=Reason.TARGET_INCOMPATIBLE, remedy=error.remedy) from error
