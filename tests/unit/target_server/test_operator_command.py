"""`target-server pause`, `resume` and `drain`, said to an admin service that listens."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from slipstream.errors import SlipstreamError
from slipstream.hidden_states.v1.stream_admin_service_pb2_grpc import add_StreamAdminServiceServicer_to_server
from slipstream.run_spec.reasons import Reason
from slipstream.wire.channel import SERVER_OPTIONS
from slipstream.wire.status import StatusInterceptor
from target_server.admin_service import StreamAdminService
from target_server.cli import run_command
from target_server.lease_book import DeliveryState
from target_server.readiness import Readiness
from tests.fakes.ledger_desk import LedgerDesk


@pytest.fixture
def address(desk: LedgerDesk) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(2), interceptors=[StatusInterceptor()], options=SERVER_OPTIONS)
    add_StreamAdminServiceServicer_to_server(StreamAdminService(desk.control, Readiness("m")), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait(10)


def test_a_run_is_paused_and_resumed(desk: LedgerDesk, address: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = desk.join("a")
    assert run_command(["pause", address, "a"]) == 0
    assert desk.ask(*run).state is DeliveryState.PAUSED
    assert capsys.readouterr().out == f"a gets no packs until: target-server resume {address} a\n"
    assert run_command(["resume", address, "a"]) == 0
    assert desk.get(*run) == [0]


def test_a_server_is_drained(desk: LedgerDesk, address: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = desk.join("a")
    assert run_command(["drain", address]) == 0
    assert desk.ask(*run).state is DeliveryState.DRAINING
    assert "finishes what is leased" in capsys.readouterr().out


def test_a_ledger_that_cannot_be_written_is_not_taken_for_a_server_that_is_away(desk: LedgerDesk, address: str) -> None:
    run = desk.join("a")
    with desk.unwritable(), pytest.raises(SlipstreamError, match="cannot write its ledger now") as caught:
        run_command(["pause", address, "a"])
    assert caught.value.reason is Reason.LEDGER_UNWRITABLE
    assert desk.ask(*run).state is DeliveryState.ACTIVE


@pytest.mark.parametrize(
    ("arguments", "words", "reason"),
    [
        (["pause", "{address}", "b"], "no subscription 'subscriptions/b'", Reason.SUBSCRIPTION_UNKNOWN),
        (["drain", "127.0.0.1:1"], "127.0.0.1:1 does not answer", Reason.TARGET_UNREACHABLE),
        (["drain", "here"], "not the address", Reason.SPEC_INVALID),
    ],
)
def test_what_cannot_be_told_is_refused_at_once(address: str, arguments: list[str], words: str, reason: Reason) -> None:
    with pytest.raises(SlipstreamError, match=words) as caught:
        run_command([each.format(address=address) for each in arguments])
    assert caught.value.reason is reason
