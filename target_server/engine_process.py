"""④→⑤ An engine in a process of its own: told over a line which packs to compute, it writes them into their slots.

An engine is one process for each of its ranks. All hear the same orders in the same order and run the same forwards;
the first rank writes hidden states and answers. Whoever loses the line leaves at once, whatever it is doing: the server
is gone, or does not want it any more.
"""

import logging
import os
import queue
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.run_spec.spec import TargetSpec
from slipstream.tensor_parallel import Rank
from slipstream.wire.codec import ByteArray, PayloadLayout, plan_layout, write_tensor
from target_server.engine_arena import MappedArena, layout_fields, read_layout
from target_server.engine_line import EngineLine, Message
from target_server.packing import Pack
from target_server.producer import Producer
from target_server.shelf import PackFacts, Slot
from target_server.slot_writer import SlotMemory, Slots, SlotWrite, SlotWriter
from target_server.state_cache_part import Rows
from target_server.target_model import TargetModel
from target_server.work_queue import NOT_FINITE, Work


def run_engine(line: EngineLine, threads: int | None) -> int:
    """Load the target that the server names and compute packs until the line is lost.

    Raises:
        SlipstreamError: the target cannot be loaded or run; the server has been told.
    """
    # The server ends it, also where a terminal or a service manager signals every process at once.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if threads is not None:
        torch.set_num_threads(threads)
    begin = line.receive()
    if begin is None:
        return 0
    orders = _Orders(line, begin.fields)
    threading.Thread(target=orders.listen, name="line", daemon=True).start()
    # Where the line is lost in the middle of an answer.
    with suppress(BrokenPipeError, ConnectionResetError), _refusals_told(line):
        target = _load(begin.fields)
        line.send(Message("ready", _facts(target)))
        writer = SlotWriter(target.device) if orders.writes else _NoWriter(torch.device("cpu"))
        orders.target = target
        Producer(target, orders, orders, writer).run()
    return 0


def _load(begin: Mapping[str, Any]) -> TargetModel:
    target = TargetModel.load(
        TargetSpec.model_validate_json(begin["target"]),
        device=begin["device"],
        fingerprint=begin["fingerprint"],
        rank=Rank(begin["rank"], begin["ranks"], begin["rendezvous"]),
    )
    if begin["pack_tokens"] is not None:
        target.prepare(begin["pack_tokens"])
    return target


def _facts(target: TargetModel) -> dict[str, Any]:
    """What the server must know of a target that it has not loaded."""
    return {
        "config": target.config.canonical_json(),
        "model_id": target.model_id,
        "revision": target.revision,
        "dtype": str(target.dtype).removeprefix("torch."),
        "max_document_tokens": target.max_document_tokens,
        "computes_any_length": target.computes_any_length,
    }


@contextmanager
def _refusals_told(line: EngineLine) -> Iterator[None]:
    """What can be said in words is said to the server, which knows whether to go on."""
    try:
        yield
    except SlipstreamError as error:
        fields = {"message": error.message, "reason": error.reason.value, "remedy": error.remedy}
        line.send(Message("refused", fields))
        raise


class _Packs:
    """The packs that have been ordered and are not begun."""

    def __init__(self) -> None:
        self._ordered: dict[int, Pack] = {}

    def put(self, pack: Pack) -> None:
        self._ordered[pack.sequence_number] = pack

    def pack(self, sequence_number: int) -> Pack:
        return self._ordered.pop(sequence_number)


@dataclass(frozen=True)
class _Stream:
    """What an order says of its stream."""

    name: str
    layer_ids: tuple[int, ...]
    last_hidden_state: bool
    pack_tokens: int
    layout: PayloadLayout
    arena: Slots
    sequence: _Packs = field(default_factory=_Packs)


class _Orders:
    """What the server orders: the producer's assignments and streams. The main thread obeys, `listen` has its own."""

    def __init__(self, line: EngineLine, begin: Mapping[str, Any]) -> None:
        self._line = line
        self._directory = Path(begin["shm_dir"])
        self._for_gpu = begin["device"] != "cpu"
        self.writes = begin["rank"] == 0
        self.target: TargetModel | None = None
        self._heard: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        """By the segment that holds its packs."""
        self._segments: dict[str, str] = {}
        """Stream → segment."""
        self._frozen: dict[str, Tensor] = {}

    def listen(self) -> None:
        """Until the line is lost, and with it the process."""
        while (message := self._line.receive()) is not None:
            self._heard.put(message)
        logging.shutdown()
        os._exit(0)

    def get(self, name: str) -> _Stream:
        """As StreamCatalog."""
        return self._streams[self._segments[name]]

    def next_work(self, max_wait: float = float("inf")) -> Work | None:
        """Obey what was ordered up to the next pack; None when there is none for so long."""
        while True:
            try:
                order = self._heard.get(timeout=None if max_wait == float("inf") else max_wait)
            except queue.Empty:
                return None
            if order.kind == "pack":
                return self._work(order)
            self._obey(order)

    def publish(self, work: Work, _facts: PackFacts) -> None:
        """The pack lies in its slot."""
        self._answer(work, finite=True)

    def quarantine(self, work: Work, _document_names: tuple[str, ...], _why: str = NOT_FINITE) -> None:
        """It does, but is not finite."""
        self._answer(work, finite=False)

    def abandon(self, _work: Work) -> None:
        """This process is about to end: the server sees that."""

    def _answer(self, work: Work, *, finite: bool) -> None:
        if self.writes:
            self._line.send(
                Message("computed", {"stream": work.stream, "number": work.sequence_number, "finite": finite})
            )

    def _work(self, order: Message) -> Work:
        fields = order.fields
        stream = self._streams.get(fields["segment"]) or self._open(fields)
        stream.sequence.put(read_pack(fields, order.blob, stream.pack_tokens))
        documents = fields["documents"]
        part = None if documents is None else tuple(documents)
        return Work(stream.name, fields["number"], Slot(fields["slot"]), part)

    def _open(self, fields: Mapping[str, Any]) -> _Stream:
        segment = fields["segment"]
        stream = _Stream(
            name=fields["stream"],
            layer_ids=tuple(fields["layers"]),
            last_hidden_state=fields["last_hidden_state"],
            pack_tokens=fields["pack_tokens"],
            layout=read_layout(fields["layout"], fields["size_bytes"]),
            arena=MappedArena(self._directory / segment, for_gpu=self._for_gpu) if self.writes else _NoSlots(),
        )
        self._streams[segment] = stream
        self._segments[stream.name] = segment
        return stream

    def _obey(self, order: Message) -> None:
        if not self.writes:
            self._streams.pop(order.fields.get("segment", ""), None)
            return
        answer: dict[str, Any] = {}
        if order.kind == "forget":
            self._forget(order.fields["segment"])
        elif order.kind == "describe_frozen_weights":
            assert self.target is not None
            self._frozen = self.target.frozen_weights()
            layout = plan_layout([(name, tensor.dtype, tensor.shape) for name, tensor in self._frozen.items()])
            answer = {"layout": layout_fields(layout), "size_bytes": layout.size_bytes}
        else:
            assert order.kind == "write_frozen_weights", order.kind
            self._write_frozen_weights(order.fields)
        self._line.send(Message("done", {"of": order.fields["id"], **answer}))

    def _forget(self, segment: str) -> None:
        stream = self._streams.pop(segment, None)
        if stream is not None:
            assert isinstance(stream.arena, MappedArena)
            stream.arena.close()

    def _write_frozen_weights(self, fields: Mapping[str, Any]) -> None:
        arena = MappedArena(self._directory / fields["segment"], for_gpu=False)
        for spec in read_layout(fields["layout"], fields["size_bytes"]).specs:
            write_tensor(arena.slot(0), spec, self._frozen[spec.name])
        arena.close()
        self._frozen = {}


class _NoSlots:
    """Of ranks that write nothing."""

    def slot(self, _index: int) -> ByteArray:
        raise AssertionError("this rank writes nothing")

    def generation(self, _index: int) -> int:
        return 0

    def begin_write(self, _index: int) -> None:
        pass

    def end_write(self, _index: int) -> None:
        pass


class _NoWriter(SlotWriter):
    """Of ranks that write nothing."""

    def begin(
        self,
        stream: SlotMemory,
        slot_index: int,
        host: Mapping[str, Tensor],  # noqa: ARG002 - as SlotWriter
        states: Mapping[str, Tensor],  # noqa: ARG002
        rows: Rows | None = None,  # noqa: ARG002
    ) -> SlotWrite:
        return SlotWrite(stream.arena, slot_index, torch.ones((), dtype=torch.bool), None)


def pack_message(pack: Pack) -> tuple[dict[str, Any], bytes]:
    """A pack as the fields and the bytes of a message."""
    fields = {"number": pack.sequence_number, "lengths": pack.document_lengths, "supervised": pack.num_supervised}
    rows = (pack.token_ids, pack.document_ids, pack.position_ids, pack.loss_mask)
    return fields, b"".join(row.tobytes() for row in rows)


def read_pack(fields: Mapping[str, Any], blob: bytes, rows: int) -> Pack:
    """What `pack_message` wrote of a pack of `rows` tokens; without the names of its documents."""
    token_ids, document_ids, position_ids = np.frombuffer(blob, np.int32, 3 * rows).reshape(3, rows).copy()
    return Pack(
        sequence_number=fields["number"],
        token_ids=token_ids,
        loss_mask=np.frombuffer(blob, np.uint8, rows, 12 * rows).copy(),
        document_ids=document_ids,
        position_ids=position_ids,
        document_lengths=tuple(fields["lengths"]),
        document_names=(),
        num_tokens=sum(fields["lengths"]),
        num_supervised=fields["supervised"],
    )
