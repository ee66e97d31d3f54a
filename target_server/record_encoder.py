"""①→② For a block of records: parsed, split, tokenized, masked, accounted for. A pure function."""

import hashlib
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from typing import TYPE_CHECKING, Literal

from slipstream.run_spec.spec import DataSpec
from slipstream.wire.data_report import DataReport, Finding, ReportBuilder
from target_server.conversations import Conversation, RecordFormat, TokenRow, parse_record
from target_server.document_table import EncodedDocuments, encode_documents, place_of
from target_server.messages import BadRecordError
from target_server.record_files import Position, Record
from target_server.tokens_and_mask import ChatEncoder, TrainTurns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Split = Literal["train", "heldout"]

_AHEAD = 2
"""Blocks that wait for each worker process, so that none runs dry."""


@dataclass(frozen=True)
class EncodingSettings:
    """What decides, besides records and tokenizer, which documents they become."""

    record_format: RecordFormat
    max_tokens: int
    train_turns: TrainTurns
    split: Split
    heldout_fraction: float

    @classmethod
    def of(cls, data: DataSpec, split: Split) -> "EncodingSettings":
        """As a recipe says."""
        return cls(
            data.format, data.max_document_tokens or data.pack_tokens, data.train_turns, split, data.heldout_fraction
        )


@dataclass(frozen=True)
class Block:
    """Some records of one file, one behind the other."""

    file: int
    """Number of the file, from 0."""
    name: str
    records: Sequence[Record]
    layout: RecordFormat | None = None
    """Of the file's first record; None when it is not known."""

    @property
    def end(self) -> Position:
        """After the last record."""
        return self.records[-1].position


@dataclass(frozen=True)
class EncodedBlock:
    """What became of a block."""

    documents: EncodedDocuments
    report: DataReport


class RecordEncoder:
    """Blocks in, documents of one split out."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", settings: EncodingSettings) -> None:
        """Raises SlipstreamError (MODEL_INVALID) for a tokenizer without offsets or chat template."""
        self._settings = settings
        self._chat = ChatEncoder(tokenizer, settings.max_tokens, train_turns=settings.train_turns)

    def encode(self, block: Block) -> EncodedBlock:
        """The documents of a block, in order, and the account of its records."""
        report = ReportBuilder()
        places: dict[str, tuple[int, int]] = {}
        documents = []
        for conversation, rows in self._chat.encode(self._of_split(block, report, places), report):
            identity, place = places[conversation.where]
            documents += [(row, identity, place) for row in rows]
        return EncodedBlock(encode_documents(documents), report.build(self._settings.split))

    def _of_split(
        self, block: Block, report: ReportBuilder, places: dict[str, tuple[int, int]]
    ) -> Iterator[Conversation | TokenRow]:
        for record in block.records:
            report.read += 1
            number = record.position.record
            where = f"{block.name}:{number}"
            try:
                parsed = parse_record(record.content, self._settings.record_format, where)
            except BadRecordError as bad:
                report.drop(bad.finding, where)
                continue
            identity = id_hash(parsed.id)
            if is_heldout(identity, self._settings.heldout_fraction) == (self._settings.split == "heldout"):
                places[where] = (_signed(identity), place_of(block.file, number))
                if block.layout not in (None, parsed.layout):
                    report.note(Finding.OTHER_LAYOUT, where)
                if isinstance(parsed, Conversation) and not parsed.roles_alternate:
                    report.note(Finding.ROLES_OUT_OF_ORDER, where)
                yield parsed
            else:
                report.other_split += 1


def id_hash(conversation_id: str) -> int:
    """The first eight bytes of the id's sha256, as an unsigned number."""
    return int.from_bytes(hashlib.sha256(conversation_id.encode()).digest()[:8], "big")


def is_heldout(identity: int, fraction: float) -> bool:
    """Whether a conversation is held out: its `id_hash`, read as a number in [0, 1), lies below `fraction`."""
    return identity < fraction * 2.0**64


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def encode_blocks(
    blocks: Iterable[Block], tokenizer: "PreTrainedTokenizerBase", settings: EncodingSettings, *, jobs: int
) -> Iterator[tuple[Block, EncodedBlock]]:
    """Encode blocks in `jobs` processes (1: in this one); the results keep the order."""
    if jobs == 1:
        encoder = RecordEncoder(tokenizer, settings)
        for block in blocks:
            yield block, encoder.encode(block)
        return
    # Not forked from this process, which may have threads and a GPU; the server that forks them has only imported.
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__, "transformers"])
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_start_worker, initargs=(tokenizer, settings))
    try:
        waiting: list[tuple[Block, Future[EncodedBlock]]] = []
        for block in blocks:
            waiting.append((block, pool.submit(_encode_in_worker, block)))
            if len(waiting) > jobs * _AHEAD:
                first, result = waiting.pop(0)
                yield first, result.result()
        for first, result in waiting:
            yield first, result.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker: RecordEncoder | None = None


def _start_worker(tokenizer: "PreTrainedTokenizerBase", settings: EncodingSettings) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    _worker = RecordEncoder(tokenizer, settings)


def _leave_with_parent() -> None:
    """A worker does not hear that its parent was killed: it would wait for work for ever."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_in_worker(block: Block) -> EncodedBlock:
    assert _worker is not None
    return _worker.encode(block)
