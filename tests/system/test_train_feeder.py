"""The feeder against a real target server, with faults put between it and the payloads."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from drafter_trainer.batch_source import BatchSource
from drafter_trainer.device_copy import DeviceCopy
from drafter_trainer.run_directory import RunDirectory
from drafter_trainer.target_link import TargetLink
from drafter_trainer.training_packs import PackPlan
from slipstream.errors import SlipstreamError
from slipstream.hidden_states.v1 import hidden_state_service_pb2 as pb
from slipstream.hidden_states.v1 import stream_admin_service_pb2 as admin_pb
from slipstream.hidden_states.v1.hidden_state_service_pb2_grpc import HiddenStateServiceStub
from slipstream.run_spec.reasons import Reason
from slipstream.wire.channel import CHANNEL_OPTIONS, WaitInterruptedError
from slipstream.wire.transports.base import PayloadRef
from tests.fakes.feeder_desk import CPU, SHAPES, FeederDesk, refusing


class Heard(logging.Handler):
    """An event that is set once something is logged."""

    def __init__(self, event_name: str) -> None:
        super().__init__()
        self.event = threading.Event()
        self._name = event_name
        logging.getLogger("drafter_trainer").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage() == self._name:
            self.event.set()
            logging.getLogger("drafter_trainer").removeHandler(self)


@pytest.fixture
def desk(tiny_recipe: Path, target_address: str, tmp_path: Path) -> Iterator[FeederDesk]:
    opened = FeederDesk(tiny_recipe, target_address, tmp_path / "run")
    yield opened
    opened.close()


def void(_result: object) -> None:
    """A fault that only takes time."""


def take(source: BatchSource, steps: int) -> list[list[int]]:
    """Sequence numbers of the next steps."""
    batches = [source.next_batch() for _ in range(steps)]
    return [[pack.sequence_number for pack in batch.packs] for batch in batches if batch is not None]


def test_another_model_than_that_of_the_run_is_refused_at_the_greeting(
    desk: FeederDesk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nobody has asked before where no control plane stands between."""
    greet = desk.client.get_target

    def greet_as_another() -> pb.GetTargetResponse:
        target = pb.GetTargetResponse()
        target.CopyFrom(greet())
        target.model_id = "other/model"
        return target

    monkeypatch.setattr(desk.client, "get_target", greet_as_another)
    with pytest.raises(SlipstreamError, match="serves other/model, the run is defined for some/model") as refused:
        desk.join("another", "target.model=some/model")
    assert refused.value.reason is Reason.TARGET_INCOMPATIBLE and "target.model=other/model" in refused.value.remedy
    joined = desk.join("a-copy", "target.model=./some/model")
    # The hub has renamed it since the run began: the fingerprint decides.
    named = desk.spec.target.model_copy(update={"model": "some/model"})
    spec = desk.spec.model_copy(update={"target": named})
    resumed = TargetLink(desk.client, desk.notice, spec, RunDirectory(tmp_path / "resumed"), pin_memory=False)
    resumed.handshake(joined.fingerprint)
    with pytest.raises(SlipstreamError, match="The target changed under run a-copy") as refused:
        resumed.handshake("f" * 64)
    assert refused.value.reason is Reason.TARGET_FINGERPRINT_MISMATCH
    resumed.close()


def test_lost_leases_and_corrupt_bytes_change_nothing_of_the_order(
    desk: FeederDesk, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    faults = {
        2: [refusing(Reason.LEASE_LOST)],
        4: [refusing(Reason.PAYLOAD_CORRUPT)],
        5: [refusing(Reason.LEASE_LOST), refusing(Reason.LEASE_LOST)],
    }
    link, source = desk.start(
        "faulty", "train.packs_per_step=2", "train.max_steps=6", "stream.lease_seconds=1", faults=faults
    )
    assert take(source, 6) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert not any(faults.values()), "not every fault happened"
    assert caplog.text.count("payload_corrupt") == 1
    assert link.quarantined == frozenset()


def test_a_pack_that_is_corrupt_again_and_again_is_left_out(desk: FeederDesk) -> None:
    faults = {3: [refusing(Reason.PAYLOAD_CORRUPT)] * 5}
    link, source = desk.start("spoilt", "train.packs_per_step=2", "train.max_steps=4", faults=faults)
    assert take(source, 4) == [[0, 1], [2], [4, 5], [6, 7]]
    assert link.quarantined == {3}


def test_a_step_whose_only_pack_is_left_out_is_empty(desk: FeederDesk) -> None:
    faults = {1: [refusing(Reason.PAYLOAD_CORRUPT)] * 5}
    _, source = desk.start("hollow", "train.max_steps=3", faults=faults)
    assert take(source, 3) == [[0], [], [2]]


def test_no_more_is_fetched_than_was_allowed(desk: FeederDesk) -> None:
    link, source = desk.start("modest", "train.max_steps=50", "stream.prefetch_packs=4")
    with source._changed:
        assert source._changed.wait_for(lambda: len(source._ready) == 4, timeout=60)
    assert take(source, 2) == [[0], [1]]
    with source._changed:
        assert source._changed.wait_for(lambda: len(source._ready) == 4, timeout=60)
    stats = desk.client.get_stream_stats(admin_pb.GetStreamStatsRequest(stream=link.stream))
    ours = next(entry for entry in stats.subscriptions if entry.subscription == link.subscription)
    assert ours.packs_leased == 6


def test_a_pause_is_said_once_and_ends(desk: FeederDesk, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    link, source = desk.start("paused", "train.max_steps=30", "stream.prefetch_packs=2")
    first = take(source, 3)
    said = Heard("stream_paused")
    desk.client.pause_subscription(admin_pb.PauseSubscriptionRequest(subscription=link.subscription))
    # A feeder whose room is full asks for nothing, and so hears nothing: what was ready before is taken first.
    taking = time.monotonic() + 60
    while not said.event.wait(0.02):
        assert time.monotonic() < taking, "the pause was never said"
        if source.is_ready():
            first += take(source, 1)
    desk.client.resume_subscription(admin_pb.ResumeSubscriptionRequest(subscription=link.subscription))
    rest = take(source, 30 - len(first))
    assert [number for step in first + rest for number in step] == list(range(30))
    assert caplog.text.count("stream_paused") == 1


def test_a_slow_read_loses_its_lease_and_is_delivered_again(desk: FeederDesk) -> None:
    slow = threading.Event()
    faults: dict[int, list[Callable[[], None]]] = {1: [lambda: void(slow.wait(1.0))]}
    link, source = desk.start("slow", "train.max_steps=4", "stream.lease_seconds=0.3", faults=faults)
    assert take(source, 4) == [[0], [1], [2], [3]]
    assert not faults[1] and link.quarantined == frozenset()


@pytest.mark.parametrize("failure", [SlipstreamError("x", reason=Reason.TRANSPORT_UNAVAILABLE), ValueError("a defect")])
def test_what_ends_the_feeder_is_raised_where_the_training_is(desk: FeederDesk, failure: Exception) -> None:
    def fail() -> None:
        raise failure

    _, source = desk.start("ended", "train.max_steps=9", faults={2: [fail]})
    with pytest.raises(type(failure)) as raised:
        take(source, 9)
    assert raised.value is failure


def test_a_wait_to_confirm_the_last_pack_is_over_once_it_was_answered(
    desk: FeederDesk, caplog: pytest.LogCaptureFixture
) -> None:
    """The feeder ends then, and asks for nothing more."""
    caplog.set_level(logging.INFO)
    to_target = desk.client._stub.ConfirmRead
    with grpc.insecure_channel("127.0.0.1:1", options=CHANNEL_OPTIONS) as nowhere:
        routes = [to_target, to_target, HiddenStateServiceStub(nowhere).ConfirmRead, to_target]  # type: ignore[no-untyped-call]

        class Rerouted:
            def with_call(self, request: object, timeout: float) -> object:
                return routes.pop(0).with_call(request, timeout=timeout)

        desk.client._stub.ConfirmRead = Rerouted()
        _, source = desk.start("blip", "train.max_steps=3")
        assert take(source, 3) == [[0], [1], [2]]
        source._thread.join(60)
    assert not source._thread.is_alive() and not routes
    said = [record.message for record in caplog.records if record.message in ("waiting_for_target", "target_is_back")]
    assert said == ["waiting_for_target", "target_is_back"]


def test_a_newer_trainer_ends_the_older_feeder(
    desk: FeederDesk, tiny_recipe: Path, target_address: str, tmp_path: Path
) -> None:
    link, source = desk.start("overtaken", "train.max_steps=100000")
    assert take(source, 2) == [[0], [1]]
    newcomer = FeederDesk(tiny_recipe, target_address, tmp_path / "run")
    newer, newer_source = newcomer.start("overtaken", "train.max_steps=100000")
    with pytest.raises(SlipstreamError) as stale:
        take(source, 100)
    assert stale.value.reason is Reason.INCARNATION_STALE
    with pytest.raises(SlipstreamError) as refused:
        link.commit(1)
    assert refused.value.reason is Reason.INCARNATION_STALE
    assert take(newer_source, 1) == [[0]]
    newer.commit(0)
    newcomer.close()


def test_a_commit_that_was_given_up_goes_before_the_next(desk: FeederDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    link, source = desk.start("given-up", "train.max_steps=5")

    def told_to_stop(_request: object) -> None:
        raise WaitInterruptedError()

    assert take(source, 2) == [[0], [1]]
    with monkeypatch.context() as away:
        away.setattr(desk.client, "commit_step", told_to_stop)
        with pytest.raises(WaitInterruptedError):
            link.commit(0)
    link.commit(1)
    stats = desk.client.get_stream_stats(admin_pb.GetStreamStatsRequest(stream=link.stream))
    ours = next(entry for entry in stats.subscriptions if entry.subscription == link.subscription)
    assert ours.packs_committed == 2


def test_a_lease_comes_back_while_a_commit_waits(desk: FeederDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the leases that are out would run out; also when the answer names a pack that is quarantined now."""
    link = desk.join("unwritten", "train.max_steps=5")
    waits, go_on = threading.Event(), threading.Event()
    lease_packs, commit_step = desk.client.lease_packs, desk.client.commit_step

    def wait_and_commit(request: pb.CommitStepRequest) -> pb.CommitStepResponse:
        waits.set()
        assert go_on.wait(120)
        return commit_step(request)

    def lease_and_quarantine(request: pb.LeasePacksRequest) -> pb.LeasePacksResponse:
        response = lease_packs(request)
        response.quarantined_sequence_numbers.append(9)
        return response

    while not (leases := link.lease(1).leases):
        pass  # the engine computes it
    assert link.reader.read(PayloadRef.of_lease(leases[0]), ["input_ids"]) and link.confirm(leases[0])
    monkeypatch.setattr(desk.client, "commit_step", wait_and_commit)
    monkeypatch.setattr(desk.client, "lease_packs", lease_and_quarantine)
    with ThreadPoolExecutor(2) as pool:
        commit = pool.submit(link.commit, 0)
        try:
            assert waits.wait(60)
            pool.submit(link.lease, 1).result(60)
            assert link.quarantined == {9} and not commit.done()
        finally:
            go_on.set()
        commit.result(60)


def test_a_commit_to_a_server_with_an_older_ledger_is_made_good_by_a_seek(
    desk: FeederDesk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    link, source = desk.start("rolled-back", "train.max_steps=9")

    def lost(_request: object) -> None:
        raise SlipstreamError("injected", reason=Reason.LEASE_LOST)

    assert take(source, 2) == [[0], [1]]
    with monkeypatch.context() as rolled_back:
        rolled_back.setattr(desk.client, "commit_step", lost)
        link.commit(0)
    assert take(source, 7) == [[step] for step in range(2, 9)]
    assert "rejoined" in caplog.text
    link.commit(8)
    stats = desk.client.get_stream_stats(admin_pb.GetStreamStatsRequest(stream=link.stream))
    ours = next(entry for entry in stats.subscriptions if entry.subscription == link.subscription)
    assert ours.packs_committed == 9


def test_nothing_is_computed_behind_the_end_of_the_run(desk: FeederDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server computes ahead of its trainers, and knows of `max_steps` what they tell it."""
    asked: list[int] = []
    lease_packs = desk.client.lease_packs

    def heard(request: pb.LeasePacksRequest) -> pb.LeasePacksResponse:
        asked.append(request.end_sequence_number)
        return lease_packs(request)

    monkeypatch.setattr(desk.client, "lease_packs", heard)
    # A stream that no other test has.
    link, source = desk.start("ends", "train.max_steps=5", "data.seed=17")
    assert take(source, 5) == [[step] for step in range(5)]
    assert set(asked) == {5}
    stats = desk.client.get_stream_stats(admin_pb.GetStreamStatsRequest(stream=link.stream))
    assert stats.packs_computed == 5


def test_a_stop_ends_the_wait(desk: FeederDesk) -> None:
    link, source = desk.start("stopped", "train.max_steps=100000")
    take(source, 1)
    desk.client.pause_subscription(admin_pb.PauseSubscriptionRequest(subscription=link.subscription))
    taken: list[object] = []
    thread = threading.Thread(target=lambda: taken.extend(take(source, 10_000)))
    thread.start()
    desk.stop.set()
    source.wake()
    thread.join(60)
    assert not thread.is_alive() and len(taken) < 10_000
    source.close()
    assert not source._thread.is_alive()


def test_a_pack_of_another_shape_never_reaches_the_device(desk: FeederDesk) -> None:
    link = desk.join("misfit", "train.max_steps=3")
    wrong = dict(SHAPES) | {"input_ids": (256,)}
    plan = PackPlan(0, 1, 3, wrong, 16, 0, 2, 60.0)
    desk.source = source = BatchSource(link, plan, DeviceCopy(CPU), desk.stop)
    source.start(0)
    with pytest.raises(SlipstreamError, match=r"input_ids \[128\] \(expected \[256\]\)") as refused:
        source.next_batch()
    assert refused.value.reason is Reason.PACK_OUTSIDE_BUCKETS


def test_a_short_pack_is_padded_to_its_bucket(desk: FeederDesk) -> None:
    link = desk.join("padded", "train.max_steps=2")
    longer = {name: (256, *shape[1:]) for name, shape in SHAPES.items()}
    plan = PackPlan(link.first_sequence_number, 1, 2, longer, 16, 0, 2, 60.0, shorter_lengths=(384,))
    desk.source = source = BatchSource(link, plan, DeviceCopy(CPU), desk.stop)
    source.start(0)
    batch = source.next_batch()
    assert batch is not None
    assert {name: tuple(batch.packs[0].tensors[name].shape) for name in longer} == longer
    assert batch.packs[0].tensors["document_ids"][128:].eq(-1).all()
