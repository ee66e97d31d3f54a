"""An order to a target server: what is known of it when there is no answer."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from slipstream.errors import SlipstreamError
from slipstream.hidden_states.v1 import stream_admin_service_pb2 as pb
from slipstream.hidden_states.v1.stream_admin_service_pb2_grpc import add_StreamAdminServiceServicer_to_server
from slipstream.run_spec.reasons import Reason
from slipstream.wire.ask_once import order_to
from slipstream.wire.channel import SERVER_OPTIONS
from slipstream.wire.status import StatusInterceptor
from target_server.admin_service import StreamAdminService
from target_server.readiness import Readiness
from tests.fakes.ledger_desk import LedgerDesk

PAUSE = pb.PauseSubscriptionRequest(subscription="subscriptions/a")


class Admin(StreamAdminService):
    """Carries orders out; `then` is what becomes of the answer."""

    then: Callable[[grpc.ServicerContext], object] = staticmethod(lambda context: None)

    def PauseSubscription(  # noqa: N802
        self, request: pb.PauseSubscriptionRequest, context: grpc.ServicerContext
    ) -> pb.PauseSubscriptionResponse:
        answer = super().PauseSubscription(request, context)
        self.then(context)
        return answer


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[LedgerDesk]:
    """With a subscription of the run `a`."""
    desk = LedgerDesk(tmp_path / "ledger.sqlite")
    desk.open("a")
    yield desk
    desk.close()


@pytest.fixture
def admin(ledger: LedgerDesk) -> Admin:
    return Admin(ledger.control, Readiness("m"))


@pytest.fixture
def address(admin: Admin) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(2), interceptors=[StatusInterceptor()], options=SERVER_OPTIONS)
    add_StreamAdminServiceServicer_to_server(admin, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait(30)


def pause(address: str, deadline: float | None = None) -> SlipstreamError:
    """Why the order has no answer."""
    with pytest.raises(SlipstreamError) as caught, order_to(address, token=None, deadline=deadline) as client:
        client.pause_subscription(PAUSE)
    return caught.value


def is_paused(ledger: LedgerDesk) -> bool:
    return ledger.book.subscriptions["subscriptions/a"].record.paused


def test_an_answer_that_is_lost_promises_nothing(address: str, admin: Admin, ledger: LedgerDesk) -> None:
    admin.then = lambda context: context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
    error = pause(address)
    assert error.reason is Reason.TARGET_UNREACHABLE and is_paused(ledger)
    assert error.message == (
        f"The target server at {address} does not answer: whether the order was carried out is not known."
    )
    assert "to give it twice does no harm" in error.remedy
    admin.then = lambda context: None
    with order_to(address, token=None, deadline=60.0) as client:
        client.pause_subscription(PAUSE)
    assert is_paused(ledger)


def test_an_answer_that_is_late_promises_nothing(address: str, admin: Admin) -> None:
    over = threading.Event()
    admin.then = lambda context: over.wait(30)
    try:
        error = pause(address, deadline=0.25)
    finally:
        over.set()
    assert error.reason is Reason.TARGET_UNREACHABLE
    assert "does not answer within 0.25 s: whether the order was carried out is not known." in error.message


def test_a_ledger_that_cannot_be_written_changes_nothing(address: str, ledger: LedgerDesk) -> None:
    with ledger.unwritable():
        error = pause(address)
    assert error.reason is Reason.LEDGER_UNWRITABLE and error.message.endswith("now: nothing was changed.")
    assert not is_paused(ledger)


def test_a_server_that_loads_has_changed_nothing(
    address: str, ledger: LedgerDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loads(name: str) -> None:
        raise SlipstreamError("Loading.", reason=Reason.TARGET_LOADING)

    monkeypatch.setattr(ledger.control, "pause", loads)
    error = pause(address)
    assert error.reason is Reason.TARGET_UNREACHABLE
    assert error.message.endswith("is loading its model: nothing was changed.")
    assert not is_paused(ledger)
