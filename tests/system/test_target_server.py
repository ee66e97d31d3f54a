"""A real target server process with a tiny model, spoken to as a trainer does."""

import threading
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slipstream.errors import SlipstreamError
from slipstream.hidden_states.v1 import hidden_state_service_pb2 as pb
from slipstream.hidden_states.v1 import stream_admin_service_pb2 as admin_pb
from slipstream.run_spec.reasons import Reason
from slipstream.wire.channel import TargetClient
from target_server.lineage import lineage_report
from tests.fakes.plain_trainer import Trainer, assert_same
from tests.fakes.processes import Processes
from tests.fakes.served_model import (
    HIDDEN_SIZE,
    PACK_TOKENS,
    data_spec_json,
    write_conversations,
    write_tiny_target,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_target(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_conversations(tmp_path_factory.mktemp("data") / "conversations.jsonl")


def arguments(model: Path, directory: Path, *more: str) -> list[str]:
    return [
        *("--model", str(model), "--set", "target.dtype=float32", "--device", "cpu", "--threads", "1"),
        *("--ledger", str(directory / "ledger.sqlite"), "--shelf-bytes", "2MiB", "--probe-bytes", "1MiB", *more),
    ]


def test_both_transports_give_the_same_bytes_and_packs_are_computed_once(
    processes: Processes, model: Path, conversations: Path, tmp_path: Path
) -> None:
    _, address = processes.start_target_server(*arguments(model, tmp_path))
    data = data_spec_json(conversations)
    with TargetClient(address) as client:
        runs = [Trainer(client, f"run-{name}", data, transport=name, group="pair") for name in ("grpc", "shm")]
        (total,) = {run.join().total_packs for run in runs}
        assert total > 5
        threads = [threading.Thread(target=run.train) for run in runs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
        assert [len(run.packs) for run in runs] == [total, total]
        assert_same(runs[0].packs, runs[1].packs)
        stats = runs[0].stats()
        assert (stats.packs_computed, stats.packs_recomputed) == (total, 0)
        assert [each.packs_committed for each in stats.subscriptions] == [total, total]
        request = admin_pb.GetStreamStatsRequest(subscription=runs[1].opened.subscription)
        assert client.get_stream_stats(request).stream == stats.stream == runs[0].opened.stream

    first = runs[0].packs[0]
    assert {name: tuple(tensor.shape) for name, tensor in first.items()} == {
        **dict.fromkeys(("input_ids", "loss_mask", "document_ids", "position_ids"), (PACK_TOKENS,)),
        **dict.fromkeys(("hidden_states.0", "hidden_states.2", "last_hidden_state"), (PACK_TOKENS, HIDDEN_SIZE)),
    }
    padding = first["document_ids"] == -1
    assert not first["hidden_states.2"][padding].any()
    assert first["hidden_states.2"][~padding].abs().sum(dim=1).min() > 0
    for run in runs:
        assert lineage_report(tmp_path / "ledger.sqlite", run.run).exactly_once


def test_a_killed_server_comes_back_with_the_same_stream(
    processes: Processes, model: Path, conversations: Path, tmp_path: Path
) -> None:
    server, address = processes.start_target_server(*arguments(model, tmp_path))
    data = data_spec_json(conversations)
    client = TargetClient(address)
    runs = (("whole", "shm"), ("broken", "grpc"), ("lazy", "shm"))
    whole, broken, lazy = (Trainer(client, run, data, transport=name) for run, name in runs)
    total = whole.join().total_packs
    whole.train()
    broken.join()
    broken.train(until=4)
    lazy.join()
    lazy.train(until=2)
    (lost, *_) = broken.lease().leases
    server.kill()

    port = int(address.rpartition(":")[2])
    _, again = processes.start_target_server(*arguments(model, tmp_path), port=port)
    assert again == address
    with pytest.raises(SlipstreamError) as caught:
        broken.confirm(lost)
    assert caught.value.reason is Reason.LEASE_LOST
    lazy.train(until=3)  # nothing but leases: the server opens the stream again by itself
    before = broken.incarnation
    opened = broken.join(next_step=4)
    assert (opened.total_packs, opened.incarnation, broken.incarnation) == (total, before, before + 1)
    broken.train()
    assert_same(broken.packs, whole.packs)
    # Pack 2 for the lazy run, those from 4 on, and where there was time pack 3, which the lazy one will ask for.
    assert broken.stats().packs_computed - total in (-3, -2)
    client.close()
    report = lineage_report(tmp_path / "ledger.sqlite", "broken")
    assert report.exactly_once
    assert (report.incarnations, report.next_sequence_number) == (2, total)


def test_from_loading_to_an_orderly_end(processes: Processes, model: Path, conversations: Path, tmp_path: Path) -> None:
    """Listens while it loads, asks for its token, lets leases finish on SIGTERM, and leaves nothing behind."""
    port_file, token_file = tmp_path / "port", tmp_path / "token"
    token_file.write_text("s3cret\n")
    files = ("--port-file", port_file, "--token-file", token_file)
    server = processes.start("target_server", "serve", *arguments(model, tmp_path), "--listen", "127.0.0.1:0", *files)
    server.wait_for_line("loading_target")
    address = port_file.read_text().strip()
    for token in (None, "wrong"):
        with TargetClient(address, token=token) as client, pytest.raises(SlipstreamError, match="token") as caught:
            client.get_target()
        assert caught.value.reason is Reason.ACCESS_DENIED
    waits: list[Reason] = []
    with (
        TargetClient(address, token="s3cret", on_wait=lambda reason, _: waits.append(reason)) as client,
        grpc.insecure_channel(address) as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel)
        run = Trainer(client, "run", data_spec_json(conversations))
        run.join()
        assert set(waits) <= {Reason.TARGET_LOADING}
        (lease, *rest) = run.lease(packs=1).leases
        assert not rest
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=5).status == health_pb2.HealthCheckResponse.SERVING
        server.terminate()
        server.wait_for_line("draining")
        status = health.Check(health_pb2.HealthCheckRequest(), timeout=5).status
        assert status == health_pb2.HealthCheckResponse.NOT_SERVING
        response = run.lease(max_wait=0)
        assert (response.stream_state, len(response.leases)) == (pb.STREAM_STATE_DRAINING, 0)
        assert run.read(lease)["input_ids"].any()
        assert run.confirm(lease)
    assert server.wait_exit() == 0
    segments = [path.name for path in Path("/dev/shm").glob(f"slipstream-segment-{server.pid}-*")]
    assert segments == []


def test_health_answers_while_the_engine_is_inside_a_long_forward(
    processes: Processes, conversations: Path, tmp_path: Path
) -> None:
    slow = write_tiny_target(tmp_path / "slow", num_layers=8, hidden_size=512)
    _, address = processes.start_target_server(*arguments(slow, tmp_path, "--no-shm", "--shelf-bytes", "64MiB"))
    data = data_spec_json(conversations, pack_tokens=1024)
    with TargetClient(address) as client, grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        health.Check(health_pb2.HealthCheckRequest(), timeout=5)
        run = Trainer(client, "run", data, transport="grpc")
        run.join()
        computed = threading.Event()

        def lease() -> None:
            assert run.lease(packs=1, max_wait=30).leases
            computed.set()

        thread = threading.Thread(target=lease)
        thread.start()
        checks = 0
        while not computed.wait(0.02):
            status = health.Check(health_pb2.HealthCheckRequest(), timeout=5).status
            assert status == health_pb2.HealthCheckResponse.SERVING
            checks += 1
        thread.join(10.0)
        assert checks >= 3, "health waited for the forward, or the forward was too fast to test anything"
