"""A live target server, one transport, and plain trainers on it, for what all transports must bear alike."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from slipstream.hidden_states.v1 import batch_pb2
from slipstream.hidden_states.v1 import hidden_state_service_pb2 as pb
from slipstream.wire.channel import TargetClient
from target_server.lineage import lineage_report
from tests.fakes.live_target import LiveTarget
from tests.fakes.plain_trainer import Tensors, Trainer

SHELF_BYTES = 700_000
"""Seven packs, of thirteen in an epoch."""


class Harness:
    """A server, the transport in question, and trainers on it."""

    def __init__(self, server: LiveTarget, transport: str, data: str) -> None:
        self.server = server
        self.transport = transport
        self.data = data
        self._clients: list[TargetClient] = []

    def trainer(self, run: str, *, next_step: int = 0, **settings: Any) -> Trainer:
        """A trainer that has joined, with a client of its own."""
        self._clients.append(TargetClient(self.server.address))
        trainer = Trainer(self._clients[-1], run, self.data, transport=self.transport, **settings)
        trainer.join(next_step)
        return trainer

    def undisturbed(self) -> dict[int, Tensors]:
        """Every pack of the stream."""
        run = self.trainer("undisturbed")
        run.train()
        self.leave(run)
        return run.packs

    def leave(self, run: Trainer) -> None:
        request = pb.ReleaseLeasesRequest(
            reason=pb.RELEASE_REASON_SHUTDOWN, subscription=run.opened.subscription, incarnation=run.incarnation
        )
        run.client.release_leases(request)

    def release(self, run: Trainer, lease: batch_pb2.Lease, reason: "pb.ReleaseReason") -> None:
        run.client.release_leases(pb.ReleaseLeasesRequest(lease_tokens=[lease.lease_token], reason=reason))

    def flip_bit(self, run: Trainer, lease: batch_pb2.Lease, tensor: str) -> None:
        """In the slot where a leased pack lies."""
        stream = self.server.catalog.get(run.opened.stream)
        with self.server.book.lock:
            index = self.server.book.leases[lease.lease_token].slot.index
        (spec,) = [spec for spec in lease.manifest.tensors if spec.name == tensor]
        stream.arena.slot(index)[spec.offset_bytes + spec.size_bytes // 2] ^= 1

    def proves(self, run: Trainer) -> bool:
        return lineage_report(self.server.ledger_file, run.run).exactly_once

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self.server.close()


def in_the_middle_of_a_copy(harness: Harness, monkeypatch: pytest.MonkeyPatch, act: Callable[[Any], None]) -> None:
    """Call `act`, once, with what the reader has copied so far, when a part is copied and a part is not."""
    acted: list[None] = []

    def once(destination: Any) -> None:
        if not acted:
            acted.append(None)
            act(destination)

    if harness.transport == "shm":
        copy = np.copyto

        def slow_copy(destination: Any, source: Any) -> None:
            half = len(source) // 2
            copy(destination[:half], source[:half])
            once(destination[:half])
            copy(destination[half:], source[half:])

        monkeypatch.setattr("slipstream.wire.transports.shm.np.copyto", slow_copy)
        return
    from slipstream.wire.transports import grpc as module

    store = module._store

    def slow_store(chunk: bytes, buffer: Any, position: int) -> int:
        end = store(chunk, buffer, position)
        once(buffer[:end])
        return end

    monkeypatch.setattr(module, "_store", slow_store)
