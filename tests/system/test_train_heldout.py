"""Held-out acceptance in real processes: made by one command, measured in a run that dies, decoded afterwards."""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from drafter_trainer.checkpoint_state import best_checkpoint, read_state
from drafter_trainer.evaluation import command as evaluation
from drafter_trainer.heldout_packs import HeldoutPack, HeldoutStream, read_heldout_packs
from drafter_trainer.run_directory import RunDirectory
from drafter_trainer.target_link import TargetLink
from drafter_trainer.training_packs import payload_shapes
from drafter_trainer.wait_notice import WaitNotice
from slipstream.errors import SlipstreamError
from slipstream.heldout_rows import HeldoutRows, load_rows
from slipstream.hidden_states.v1 import hidden_state_service_pb2 as pb
from slipstream.run_spec.load import load_recipe
from slipstream.run_spec.reasons import Reason
from slipstream.wire.channel import TargetClient
from slipstream.wire.codec import ByteArray
from slipstream.wire.transports.base import ByteRun, PayloadReader, PayloadRef
from tests.fakes.live_run import measured_in, write_heldout_run
from tests.fakes.processes import ManagedProcess, Processes
from tests.fakes.training import Trainer, assert_same_run

LAYERS = (1, 2)
LENGTH = ("train.max_steps=40", "checkpoint.every_steps=10", "checkpoint.keep=1")
DIES_AFTER_MEASURING = """
import os, signal, sys
from drafter_trainer.cli import main
from drafter_trainer.metrics import MetricsFile

append = MetricsFile.append

def append_and_die(file, record):
    append(file, record)
    if record.step == 14:
        assert record.heldout_accepted_length is not None
        os.kill(os.getpid(), signal.SIGKILL)

MetricsFile.append = append_and_die
main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_heldout_run(tmp_path_factory.mktemp("heldout"))


class Server:
    """A target server that the tests of this module share; one of them kills it."""

    def __init__(self, processes: Processes, recipe: Path, ledger: Path) -> None:
        self._processes = processes
        self._flags = (recipe, "--ledger", ledger, "--probe-bytes", "1MiB", "--subscription-timeout", "1")
        self._process, self.address = processes.start_target_server(*self._flags)

    def die_and_come_back(self) -> None:
        """Killed; another one at the same address."""
        self._process.kill()
        port = int(self.address.rpartition(":")[2])
        self._process, _ = self._processes.start_target_server(*self._flags, port=port)


@pytest.fixture(scope="module")
def server(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = Processes()
    yield Server(started, recipe, tmp_path_factory.mktemp("ledger") / "ledger.sqlite")
    started.close()


@pytest.fixture(scope="module")
def target_address(server: Server) -> str:
    return server.address


def test_measured_while_it_trains_and_dies_and_decoded_afterwards(
    recipe: Path, target_address: str, processes: Processes, tmp_path: Path
) -> None:
    plain = Trainer(processes, recipe, tmp_path / "plain", *LENGTH, "name=plain", "eval.heldout=")
    plain.finish(target_address)
    assert not measured_in(plain) and best_checkpoint(plain.directory / "checkpoints") is None

    # Killed between a measurement and the checkpoint that comes after it: both steps are trained and measured again.
    run = Trainer(processes, recipe, tmp_path / "measured", *LENGTH, "name=measured", "eval.every_steps=5")
    command = run.command(target_address)
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with ManagedProcess([sys.executable, "-P", "-c", DIES_AFTER_MEASURING, *command], env=environment) as killed:
        assert killed.wait_exit(timeout=120) == -signal.SIGKILL, killed.output
    before = measured_in(run)
    assert before.keys() == {5, 10, 15}
    resumed = run.finish(target_address)
    assert "heldout_read" in resumed.output and "held-out accepted length" in resumed.output
    assert_same_run(run, plain)

    found = measured_in(run)
    assert found.keys() == {5, 10, 15, 20, 25, 30, 35, 40}
    assert {step: found[step] for step in before} == before, "the same weights were measured twice, with another result"
    best = best_checkpoint(run.directory / "checkpoints")
    assert best is not None
    state = read_state(best)
    at_checkpoints = [length for step, length in found.items() if step % 10 == 0]
    assert state.heldout is not None and state.heldout.accepted_length == max(at_checkpoints)
    assert found[state.cursor.next_step] == state.heldout.accepted_length

    parser = argparse.ArgumentParser()
    evaluation.add_arguments(parser)
    report = evaluation.measure(parser.parse_args([str(best), "--device", "cpu"]))
    decoded = report["results"]["trained"]
    assert decoded.pop("all")["accepted_length"] == pytest.approx(state.heldout.accepted_length, rel=1e-9)
    assert {source: row["accepted_length"] for source, row in decoded.items()} == pytest.approx(state.heldout.by_source)


class FaultyReader(PayloadReader):
    """The real reader; what is planned for a pack happens first, once each."""

    def __init__(self, inner: PayloadReader, faults: dict[int, list[Callable[[], None]]]) -> None:
        super().__init__()
        self.name, self.transport = inner.name, inner.transport
        self._inner, self._faults = inner, faults

    def read(self, ref: PayloadRef, names: Sequence[str]) -> dict[str, Tensor]:
        planned = self._faults.get(ref.manifest.sequence_number)
        if planned:
            planned.pop(0)()
        return self._inner.read(ref, names)

    def _fill(self, ref: PayloadRef, run: ByteRun, buffer: ByteArray) -> None:
        self._inner._fill(ref, run, buffer)

    def close(self) -> None:
        self._inner.close()


class Desk:
    """Reads the held-out packs of one run in this process."""

    def __init__(
        self, recipe: Path, address: str, directory: Path, *settings: str, layers: tuple[int, ...] = LAYERS
    ) -> None:
        self.spec = load_recipe(recipe, settings).spec
        notice = WaitNotice(address)
        self.client = TargetClient(address, on_wait=notice, on_answer=notice.over)
        self.link = TargetLink(self.client, notice, self.spec, RunDirectory(directory), pin_memory=False)
        self.link.handshake()
        assert self.spec.eval.heldout is not None
        self.rows = load_rows(Path(self.spec.eval.heldout), target_fingerprint=self.link.fingerprint, pack_tokens=128)
        shapes = payload_shapes([f"hidden_states.{layer}" for layer in layers], 128, 64)
        self.stream = HeldoutStream(self.spec, layers, shapes)

    def read(self, faults: dict[int, list[Callable[[], None]]] | None = None) -> list[HeldoutPack]:
        greet = type(self.link).handshake

        def handshake(expected_fingerprint: str | None = None) -> pb.GetTargetResponse:
            target = greet(self.link, expected_fingerprint)
            self.link._reader = FaultyReader(self.link.reader, faults or {})
            return target

        self.link.handshake = handshake  # type: ignore[method-assign]
        handshake()
        return read_heldout_packs(self.client, self.link, self.stream, self.rows)

    def close(self) -> None:
        self.link.close()
        self.client.close()


@pytest.fixture
def desk(recipe: Path, target_address: str, tmp_path: Path) -> Iterator[Desk]:
    opened = Desk(recipe, target_address, tmp_path, f"name={tmp_path.name}")
    yield opened
    opened.close()


def refusing(reason: Reason) -> Callable[[], None]:
    def fail() -> None:
        raise SlipstreamError("injected", reason=reason)

    return fail


def as_tokens(packs: Sequence[HeldoutPack]) -> list[list[int]]:
    return [pack.tensors["input_ids"].tolist() for pack in packs]


def test_every_pack_comes_whatever_happens_on_the_way(desk: Desk) -> None:
    undisturbed = as_tokens(desk.read())
    assert sum(len(pack.answers) for pack in desk.read()) == len(desk.rows.rows) == 6

    def another_takes_over() -> None:
        opened = desk.client.open_subscription(
            pb.OpenSubscriptionRequest(
                run=f"runs/{desk.stream.run}",
                data_spec_json=desk.stream.data_spec_json,
                layer_ids=LAYERS,
                packs_per_step=1,
                start_position=pb.START_POSITION_BEGINNING,
                max_epochs=1,
            )
        )
        desk.client.seek_subscription(
            pb.SeekSubscriptionRequest(subscription=opened.subscription, expected_incarnation=opened.incarnation)
        )

    faults = {0: [refusing(Reason.LEASE_LOST)], 1: [refusing(Reason.PAYLOAD_CORRUPT), another_takes_over]}
    assert as_tokens(desk.read(faults)) == undisturbed
    assert not any(faults.values()), "not everything that was planned has happened"


def test_runs_that_read_other_layers_share_the_packs(
    desk: Desk, recipe: Path, target_address: str, tmp_path: Path
) -> None:
    """Another run joins while one reads, so that its leases are void: the packs hold more layers from then on."""
    other = Desk(recipe, target_address, tmp_path / "other", f"name={tmp_path.name}-other", layers=(0, 3))
    assert other.stream.data_spec_json == desk.stream.data_spec_json
    alone, read_meanwhile = desk.read(), list[HeldoutPack]()
    packs = desk.read({1: [lambda: read_meanwhile.extend(other.read())]})
    other.close()
    assert as_tokens(packs) == as_tokens(read_meanwhile) == as_tokens(alone)
    for pack, same, of_other in zip(packs, alone, read_meanwhile, strict=True):
        assert pack.tensors.keys() == same.tensors.keys() and "hidden_states.3" in of_other.tensors
        assert all(torch.equal(pack.tensors[name], same.tensors[name]) for name in same.tensors)


def test_a_slot_may_be_written_again_as_soon_as_its_read_is_confirmed(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a GPU packs are read where they lie; what is kept of them must not."""
    undisturbed = as_tokens(desk.read())
    lent: list[dict[str, Tensor]] = []
    read, confirm = FaultyReader.read, desk.client.confirm_read

    def read_in_place(reader: FaultyReader, ref: PayloadRef, names: Sequence[str]) -> dict[str, Tensor]:
        lent.append(read(reader, ref, names))
        return lent[-1]

    def confirm_and_write_again(request: pb.ConfirmReadRequest) -> pb.ConfirmReadResponse:
        answer = confirm(request)
        for tensor in lent[-1].values():
            tensor.fill_(1)
        return answer

    monkeypatch.setattr(FaultyReader, "read", read_in_place)
    monkeypatch.setattr(desk.client, "confirm_read", confirm_and_write_again)
    assert as_tokens(desk.read()) == undisturbed


def test_a_killed_server_is_waited_for(desk: Desk, server: Server) -> None:
    assert len(desk.read({1: [server.die_and_come_back]})) == len(desk.read())


def test_another_file_under_the_same_run(desk: Desk, recipe: Path, target_address: str, tmp_path: Path) -> None:
    """A process that ended while it read left its subscription open; the next one has other prompts."""
    with pytest.raises(SlipstreamError, match="injected"):
        desk.read({1: [refusing(Reason.TRANSPORT_UNAVAILABLE)]})
    fewer = tmp_path / "fewer.jsonl"
    assert desk.spec.eval.heldout is not None
    lines = Path(desk.spec.eval.heldout).read_text().splitlines(keepends=True)
    fewer.write_text("".join(lines[:4]))
    next_desk = Desk(recipe, target_address, tmp_path, f"name={tmp_path.name}", f"eval.heldout={fewer}")
    try:
        assert sum(len(pack.answers) for pack in next_desk.read()) == 4
        # The trainer's file is not the one that the server reads: said in words.
        next_desk.rows = HeldoutRows(next_desk.rows.rows[:2], "digest")
        with pytest.raises(SlipstreamError, match="not those in this trainer's file"):
            next_desk.read()
        with pytest.raises(SlipstreamError, match="are not finite, or cannot be read"):
            next_desk.read({0: [refusing(Reason.PAYLOAD_CORRUPT)] * 9})
    finally:
        next_desk.close()
