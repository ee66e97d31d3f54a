"""The engine on a real GPU: the next pack is launched while the one before is computed."""

import queue
import threading
import time
from pathlib import Path
from typing import Any

import torch

from slipstream.run_spec.spec import TargetSpec
from target_server.lease_ledger import Ask
from target_server.producer import Producer
from target_server.slot_writer import SlotWrite, SlotWriter
from target_server.subscription import SubscriptionTerms
from target_server.target_model import TargetModel
from tests.fakes.served_model import LAYERS, data_spec_json, write_conversations, write_tiny_target
from tests.fakes.stepped_target import SteppedTarget

BUSY_CYCLES = 4_000_000_000
"""Of the GPU's clock: more than two seconds."""


class NotedWriter(SlotWriter):
    """Says which writes it has begun."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.begun: queue.Queue[SlotWrite] = queue.Queue()

    def begin(self, *arguments: Any) -> SlotWrite:
        write = super().begin(*arguments)
        self.begun.put(write)
        return write


class RunningTarget(SteppedTarget):
    """Its clock runs: an engine's thread looks after the GPU's work when a wait has ended."""

    def clock(self) -> float:
        return time.monotonic()


def test_a_pack_that_is_asked_for_while_the_gpu_computes_is_launched_behind_it(tmp_path: Path) -> None:
    conversations = write_conversations(tmp_path / "conversations.jsonl", count=30)
    terms = SubscriptionTerms("a", data_spec_json(conversations), LAYERS, True, 1, max_epochs=1)
    directory = write_tiny_target(tmp_path / "target")
    spec = TargetSpec(model=str(directory), dtype="bfloat16", compile=False)
    engine = RunningTarget(TargetModel.load(spec, device="cuda"), tmp_path / "ledger.sqlite")
    name, _ = engine.join(terms)
    writer = NotedWriter(engine.target.device)
    producer = Producer(engine.target, engine.queue, engine.catalog, writer)
    running = threading.Thread(target=producer.run, daemon=True)
    running.start()
    # The first pack of a process also loads kernels, which waits for the GPU.
    assert len(engine.ledger.lease(name, Ask(1, 1, max_wait=30.0)).leases) == 1
    writer.begun.get(timeout=30)
    torch.cuda._sleep(BUSY_CYCLES)
    assert not engine.ledger.lease(name, Ask(1, 1)).leases, "the GPU is busy"
    first = writer.begun.get(timeout=30)
    assert not engine.ledger.lease(name, Ask(1, 2)).leases, "the GPU is busy still"
    second = writer.begun.get(timeout=30)
    assert not first.is_done, "the second was launched behind the first, not after it"
    taken: list[int] = []
    while len(taken) < 2:
        grant = engine.ledger.lease(name, Ask(1, 2 - len(taken), max_wait=30.0))
        taken += [lease.sequence_number for lease in grant.leases]
    engine.queue.close()
    running.join(30)
    assert (taken, running.is_alive(), second.is_done) == ([1, 2], False, True)
    engine.close()
