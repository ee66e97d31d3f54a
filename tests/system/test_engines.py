"""Engine processes behind one target server: killed while a trainer reads, spread over ranks, and gone when it is."""

import os
import re
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.wire.channel import TargetClient
from target_server.lineage import lineage_report
from tests.fakes.plain_trainer import Tensors, Trainer
from tests.fakes.processes import ManagedProcess, Processes
from tests.fakes.served_model import LAYERS, data_spec_json, write_conversations, write_tiny_target
from tests.unit.target_model.document_alone import layer_outputs, load_reference

PATIENCE = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_target(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return data_spec_json(write_conversations(tmp_path_factory.mktemp("data") / "conversations.jsonl"))


def start(
    processes: Processes, model: Path, directory: Path, *flags: str, env: Mapping[str, str] | None = None
) -> tuple[ManagedProcess, str]:
    arguments = ["--model", model, "--set", "target.dtype=float32", "--threads", "1", "--probe-bytes", "1MiB"]
    files = ["--ledger", directory / "ledger.sqlite", "--shelf-bytes", "2MiB"]
    return processes.start_target_server(*arguments, *files, *flags, env=env, timeout=120)


def process_ids(server: ManagedProcess, engine: str, *, start: int = 0) -> list[int]:
    """Of the engine that was started after so many lines."""
    found = server.wait_for_line(rf"engine_started engine={engine} .*pids=([\d,]+)", timeout=PATIENCE, start=start)
    return [int(pid) for pid in found.group(1).split(",")]


def is_gone(pid: int) -> bool:
    """Ended; nobody may have asked for its status yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until_gone(pids: Sequence[int]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not all(is_gone(pid) for pid in pids):
        assert time.monotonic() < deadline, [pid for pid in pids if not is_gone(pid)]
        threading.Event().wait(0.05)


def assert_as_transformers_computes(model: Path, packs: Sequence[Tensors]) -> None:
    """Each document alone."""
    reference = load_reference(model)
    for pack in packs:
        documents = pack["document_ids"][pack["document_ids"] >= 0]
        borders = (0, *accumulate(torch.bincount(documents.long()).tolist()))
        for begin, end in pairwise(borders):
            expected = layer_outputs(reference, pack["input_ids"][begin:end].numpy().astype(np.int32))
            for layer in LAYERS:
                ours = pack[f"hidden_states.{layer}"][begin:end]
                assert (ours - expected[layer]).abs().max() <= 1e-5 * expected[layer].abs().max()


def test_an_engine_is_killed_while_a_trainer_reads(
    processes: Processes, model: Path, data: str, tmp_path: Path
) -> None:
    server, address = start(processes, model, tmp_path, "--devices", "cpu,cpu")
    engines = {name: process_ids(server, name) for name in ("engine-0", "engine-1")}
    for name in engines:
        server.wait_for_line(f"engine_ready engine={name}", timeout=120)
    lines = len(server.lines)

    class Killer(Trainer):
        def commit(self, step: int) -> None:
            if step == 3:
                os.kill(engines["engine-0"][0], signal.SIGKILL)
            super().commit(step)

    with TargetClient(address) as client:
        run = Killer(client, "run", data)
        total = run.join().total_packs
        assert total > 8
        run.train()
        assert sorted(run.packs) == list(range(total))
        again = process_ids(server, "engine-0", start=lines)
        server.wait_for_line("engine_ready engine=engine-0", timeout=120, start=lines)
        assert re.search("engine_died engine=engine-0 why=.*SIGKILL", server.output)
        assert "pack_quarantined" not in server.output
        # Both of them compute what another run asks for.
        other = Trainer(client, "other", data)
        other.join()
        other.train()
        assert all(torch.equal(run.packs[1][name], other.packs[1][name]) for name in run.packs[1])
    assert_as_transformers_computes(model, [run.packs[number] for number in (0, 3, 4, 5)])
    report = lineage_report(tmp_path / "ledger.sqlite", "run")
    assert report.exactly_once and report.next_sequence_number == total
    server.terminate()
    assert server.wait_exit() == 0
    assert all(is_gone(pid) for pid in (*again, *engines["engine-1"]))


def test_one_engine_of_two_ranks_is_gone_with_its_server(
    processes: Processes, model: Path, data: str, tmp_path: Path
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    flags, here = ("--devices", "cpu,cpu", "--tensor-parallel", "2"), {"TMPDIR": str(temporary)}
    server, address = start(processes, model, tmp_path, *flags, env=here)
    ranks = process_ids(server, "engine-0")
    assert len(ranks) == 2
    with TargetClient(address) as client:
        run = Trainer(client, "run", data)
        run.join()
        run.train(until=4)
    assert_as_transformers_computes(model, list(run.packs.values()))
    server.kill()
    wait_until_gone(ranks)
    assert len(list(temporary.glob("slipstream-engines-*"))) == 1
    # Whatever the next server comes to: it clears away what the killed one has left.
    refused = processes.start("target_server", "serve", "--model", tmp_path / "no-such-model", env=here)
    assert refused.wait_exit() == 3
    assert list(temporary.glob("slipstream-engines-*")) == []
