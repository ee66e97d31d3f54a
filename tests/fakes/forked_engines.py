"""Engine processes made by fork: the product's own, without the seconds that importing torch takes each of them.

    python -m tests.fakes.forked_engines DIRECTORY FAMILY …

makes a tiny target of each family, speaks to two engines and to one of two ranks as the server does, compares what they
compute with transformers' own for each document alone, and prints a line of JSON a family. This process has one thread.
"""

import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
import tqdm

from slipstream.run_spec.spec import TargetSpec
from slipstream.wire.arena import PayloadArena
from slipstream.wire.codec import LayoutEntry, PayloadLayout, plan_layout, view_tensor
from slipstream.wire.tensor_names import hidden_state_name
from target_server.engine_arena import layout_fields, read_layout, segment_of
from target_server.engine_line import EngineLine, Message
from target_server.engine_process import pack_message, run_engine
from target_server.packing import Pack
from tests.fakes.tiny_models import Family
from tests.unit.target_model.document_alone import load_reference, save_tiny_target
from tests.unit.target_model.test_packed_forward import LENGTHS, alone, largest_error, random_tokens

SMALL_TENSORS = {
    "input_ids": torch.int32,
    "loss_mask": torch.uint8,
    "document_ids": torch.int32,
    "position_ids": torch.int32,
}


@dataclass(frozen=True)
class ForkedEngine:
    """One engine, of one process for each rank."""

    lines: tuple[EngineLine, ...]
    pids: tuple[int, ...]
    facts: dict[str, object]


class ForkedEngines:
    """Engines of one target, and one stream's slots in shared memory. Use as a context."""

    def __init__(self, model: Path, directory: Path, *, pack_tokens: int, layers: Sequence[int], width: int) -> None:
        self._model = model
        self._directory = directory
        self._layers = list(layers)
        self._pack_tokens = pack_tokens
        entries: list[LayoutEntry] = [(name, dtype, (pack_tokens,)) for name, dtype in SMALL_TENSORS.items()]
        entries += [(hidden_state_name(layer), torch.float32, (pack_tokens, width)) for layer in layers]
        self._layout: PayloadLayout = plan_layout(entries)
        self._arena = PayloadArena.create(4, self._layout.size_bytes, directory=directory)
        self._pids: list[int] = []

    def start(self, ranks: int = 1) -> ForkedEngine:
        """Start an engine and wait until it is ready."""
        rendezvous = Path(tempfile.mkdtemp(dir=self._directory)) / "meeting"
        pairs = [socket.socketpair() for _ in range(ranks)]
        pids = [self._fork(theirs, [ours for ours, _ in pairs]) for _, theirs in pairs]
        lines = tuple(EngineLine(ours) for ours, _ in pairs)
        for rank, (line, (_, theirs)) in enumerate(zip(lines, pairs, strict=True)):
            theirs.close()
            spec = TargetSpec(model=str(self._model), dtype="float32")
            fields = {"target": spec.model_dump_json(), "fingerprint": "f" * 64, "device": "cpu", "pack_tokens": None}
            place = {"shm_dir": str(self._directory), "rank": rank, "ranks": ranks, "rendezvous": str(rendezvous)}
            line.send(Message("begin", fields | place))
        facts = [line.receive() for line in lines]
        assert all(message is not None and message.kind == "ready" for message in facts), facts
        first = facts[0]
        assert first is not None
        return ForkedEngine(lines, tuple(pids), dict(first.fields))

    def compute(self, engine: ForkedEngine, pack: Pack, slot: int) -> dict[str, torch.Tensor]:
        """A pack's payload, as a trainer reads it."""
        before = self._arena.generation(slot)
        fields, blob = pack_message(pack)
        fields |= {"stream": "streams/s", "slot": slot, "segment": segment_of(self._arena), "documents": None}
        fields |= {"layers": self._layers, "last_hidden_state": False, "pack_tokens": self._pack_tokens}
        fields |= {"layout": layout_fields(self._layout), "size_bytes": self._layout.size_bytes}
        for line in engine.lines:
            line.send(Message("pack", fields, blob))
        answer = engine.lines[0].receive()
        expected = {"stream": "streams/s", "number": pack.sequence_number, "finite": True}
        assert answer is not None and (answer.kind, answer.fields) == ("computed", expected)
        assert self._arena.generation(slot) == before + 2
        return {spec.name: view_tensor(self._arena.slot(slot), spec).clone() for spec in self._layout.specs}

    def frozen_weights(self, engine: ForkedEngine) -> dict[str, torch.Tensor]:
        """As the server has the engine write them."""
        for line in engine.lines:
            line.send(Message("describe_frozen_weights", {"id": 1}))
        described = engine.lines[0].receive()
        assert described is not None
        layout = read_layout(described.fields["layout"], described.fields["size_bytes"])
        arena = PayloadArena.create(1, layout.size_bytes, directory=self._directory)
        fields = {"id": 2, "segment": segment_of(arena), "layout": layout_fields(layout)}
        for line in engine.lines:
            line.send(Message("write_frozen_weights", fields | {"size_bytes": layout.size_bytes}))
        assert engine.lines[0].receive() == Message("done", {"of": 2})
        weights = {spec.name: view_tensor(arena.slot(0), spec).clone() for spec in layout.specs}
        arena.close()
        return weights

    def _fork(self, theirs: socket.socket, ours: Sequence[socket.socket]) -> int:
        pid = os.fork()
        if pid:
            self._pids.append(pid)
            return pid
        status = 1
        try:
            for each in ours:
                each.close()
            status = run_engine(EngineLine(theirs), threads=1)
        finally:
            os._exit(status)

    def __enter__(self) -> "ForkedEngines":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._arena.close()


def make_pack(number: int) -> Pack:
    """Documents of LENGTHS and some padding, with tokens drawn from the pack's number."""
    used, padding = sum(LENGTHS), 13
    rows = used + padding
    positions = np.concatenate([np.arange(length) for length in LENGTHS])
    return Pack(
        sequence_number=number,
        token_ids=np.append(random_tokens(used, seed=number), np.zeros(padding)).astype(np.int32),
        loss_mask=(np.arange(rows) < used).astype(np.uint8),
        document_ids=np.append(np.repeat(np.arange(len(LENGTHS)), LENGTHS), np.full(padding, -1)).astype(np.int32),
        position_ids=np.append(positions, np.zeros(padding)).astype(np.int32),
        document_lengths=LENGTHS,
        document_names=(),
        num_tokens=used,
        num_supervised=used,
    )


def compare(family: Family, directory: Path) -> dict[str, object]:
    """What engines compute of a family, against each document alone."""
    model = save_tiny_target(directory / family, family)
    reference = load_reference(model)
    packs = [make_pack(number) for number in range(2)]
    layers = range(len(reference.model.layers))
    used = packs[0].num_tokens

    def error(payload: dict[str, torch.Tensor], pack: Pack) -> float:
        assert np.array_equal(payload["input_ids"].numpy(), pack.token_ids)
        assert np.array_equal(payload["position_ids"].numpy(), pack.position_ids)
        states = [payload[hidden_state_name(layer)] for layer in layers]
        assert not any(state[used:].any() for state in states)
        expected = alone(reference, pack.token_ids, LENGTHS)
        return max(largest_error(state[:used], right) for state, right in zip(states, expected, strict=True))

    rows, width = len(packs[0].token_ids), reference.config.hidden_size
    with ForkedEngines(model, directory, pack_tokens=rows, layers=layers, width=width) as engines:
        first, second, split = engines.start(), engines.start(), engines.start(ranks=2)
        one = [engines.compute(first, pack, slot) for slot, pack in enumerate(packs)]
        two = engines.compute(second, packs[1], 2)
        both = engines.compute(split, packs[1], 3)
        weights = [engines.frozen_weights(each) for each in (first, split)]
    return {
        "family": family,
        "one": max(error(payload, pack) for payload, pack in zip(one, packs, strict=True)),
        "two_are_equal": all(torch.equal(one[1][name], two[name]) for name in two),
        "split": error(both, packs[1]),
        "facts_are_equal": first.facts == second.facts == split.facts,
        "weights_are_equal": weights[0].keys() == weights[1].keys()
        and all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0]),
        "weights": sorted(weights[0]),
    }


def main() -> int:
    tqdm.tqdm.monitor_interval = 0  # it would be a thread
    torch.set_num_threads(1)
    directory = Path(sys.argv[1])
    for family in sys.argv[2:]:
        sys.stdout.write(json.dumps(compare(family, directory)) + "\n")  # type: ignore[arg-type]
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
