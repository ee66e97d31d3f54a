"""⑤ Hidden states on a disk, by document: what was computed once is read, in any packing, epoch or run.

A record is one layer's states of one document, `[n, D]`. Its key is a hash of the target's fingerprint, the dtype, the
layer and the document's token ids: with them the states are given, but for rounding, which differs with the documents
that were computed beside it. Everything here works on slots, the bytes that trainers read; no device plays a part.
"""

import hashlib
import logging
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slipstream.telemetry.logs import log_event
from slipstream.wire.codec import DTYPES, write_tensor
from slipstream.wire.tensor_names import LAST_HIDDEN_STATE, hidden_state_name
from target_server.packing import Pack
from target_server.producer import ComputedStream, tensors_of
from target_server.state_cache_segment import KEY_BYTES
from target_server.state_cache_store import StateStore, too_small
from target_server.state_cache_writer import StateRows, StateWriter
from target_server.target_view import TargetView

_KEY_FORMAT = "slipstream.state-cache.key.v1"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StateCacheSettings:
    """Deployment: what the flags say."""

    directory: Path
    budget_bytes: int


@dataclass(frozen=True)
class CachedTarget:
    """What must be known of the target."""

    fingerprint: str
    num_layers: int
    hidden_size: int
    itemsize: int
    """Bytes of an element of its states."""
    computes_documents: bool
    """Whether a forward of some documents takes less time than one of all: not where layers are compiled for a fixed
    number of tokens."""


class StateCache:
    """The states of documents, between slots and a store. Thread-safe."""

    def __init__(self, store: StateStore, target: CachedTarget, pack_tokens: int | None = None) -> None:
        """Say in the log that the cache is used, and start the writing thread.

        Args:
            store: closed with the cache.
            target: whose states these are.
            pack_tokens: of the packs that will come, if known.

        Raises:
            SlipstreamError: ENVIRONMENT_UNSUPPORTED, the budget is smaller than one layer's states of a pack.
        """
        layer_bytes = (pack_tokens or 0) * target.hidden_size * target.itemsize
        if store.budget_bytes < layer_bytes:
            raise too_small(store.budget_bytes, layer_bytes)
        self._store = store
        self._target = target
        self.documents_found = 0
        self.documents_missing = 0
        self._too_large: set[str] = set()
        """Streams with packs that are larger than the budget, of which the log knows."""
        self._reported: tuple[int, ...] = ()
        self.writer = StateWriter(store, self._report)
        log_event(
            _log, "info", "state_cache", directory=store.directory, budget_gib=store.budget_bytes / 2**30,
            used_gib=store.used_bytes / 2**30, records=len(store),
            note="runs are not equal bit for bit: states read differ in rounding from states computed in another pack",
        )  # fmt: skip

    def rows(self, stream: ComputedStream, pack: Pack) -> list[StateRows]:
        """What a slot holds of each document and layer, document after document."""
        specs = {spec.name: spec for spec in stream.layout.specs}
        names = {hidden_state_name(layer): layer for layer in stream.layer_ids}
        if stream.last_hidden_state:
            names[LAST_HIDDEN_STATE] = self._target.num_layers - 1
        rows = []
        first = 0
        for document, length in enumerate(pack.document_lengths):
            tokens = np.ascontiguousarray(pack.token_ids[first : first + length], dtype="<i4")
            digest = hashlib.blake2b(tokens.data, digest_size=32).digest()
            for name, layer in names.items():
                spec = specs[name]
                row_bytes = spec.shape[1] * DTYPES[spec.data_type].itemsize
                key = self._key(digest, layer, str(DTYPES[spec.data_type]))
                rows.append(StateRows(key, document, spec.offset_bytes + first * row_bytes, length * row_bytes))
            first += length
        return rows

    def recall(
        self, stream: ComputedStream, slot_index: int, pack: Pack, rows: list[StateRows]
    ) -> tuple[int, ...] | None:
        """Fill a slot from the disk; returns the documents that are missing in it.

        None: the slot holds nothing of use, and all documents are to be computed. (): it holds the whole payload.
        """
        if self._is_too_large(stream, rows):
            return None
        documents = len(pack.document_lengths)
        with self._store.reading({row.key: row.size for row in rows}) as places:
            missing = {row.document for row in rows if row.key not in places}
            if self._is_useful(missing, documents):
                slot = stream.arena.slot(slot_index)
                stream.arena.begin_write(slot_index)
                for row in rows:
                    if row.document not in missing and not self._store.read(row.key, places[row.key], slot[row.span]):
                        missing.add(row.document)
                _write_rest(stream, slot_index, pack)
                stream.arena.end_write(slot_index)
        self.documents_found += documents - len(missing)
        self.documents_missing += len(missing)
        return tuple(sorted(missing)) if self._is_useful(missing, documents) else None

    def keep(self, stream: ComputedStream, slot_index: int, rows: list[StateRows]) -> None:
        """Copy the states out that the disk lacks; the slot is complete. Never waits for the disk."""
        if self._is_too_large(stream, rows):
            return
        lacking = {row.key: row for row in rows if row.key not in self._store}
        if lacking:
            self.writer.offer(stream.arena.slot(slot_index), tuple(lacking.values()))

    def close(self) -> None:
        """Write what waits, say what the cache was good for, and let the directory go."""
        self.writer.close()
        if not self.writer.is_alive:  # a disk that hangs must not have its files closed under it
            self._store.close()

    def _key(self, document: bytes, layer: int, dtype: str) -> bytes:
        identity = f"{_KEY_FORMAT} {self._target.fingerprint} {dtype} {layer} ".encode()
        return hashlib.blake2b(identity + document, digest_size=KEY_BYTES).digest()

    def _is_useful(self, missing: Collection[int], documents: int) -> bool:
        """Whether what is there saves work: all of the pack or, where a part can be computed, any of it."""
        return not missing or (self._target.computes_documents and len(missing) < documents)

    def _is_too_large(self, stream: ComputedStream, rows: list[StateRows]) -> bool:
        needed = sum(row.size for row in rows)
        if needed <= self._store.budget_bytes:
            return False
        if stream.name not in self._too_large:
            self._too_large.add(stream.name)
            refusal = too_small(self._store.budget_bytes, needed)
            log_event(
                _log, "warning", "state_cache_too_small", stream=stream.name, found=refusal.message,
                effect="this stream is computed", remedy=refusal.remedy,
            )  # fmt: skip
        return True

    def _report(self) -> None:
        """One line, if anything happened since the last."""
        numbers = self._store.numbers
        now = (self.documents_found, self.documents_missing, numbers.bytes_written)
        if now == self._reported or not any(now):
            return
        self._reported = now
        log_event(
            _log, "info", "state_cache_used", found=self.documents_found, missing=self.documents_missing,
            read_mib=round(numbers.bytes_read / 2**20, 1), written_mib=round(numbers.bytes_written / 2**20, 1),
            used_mib=round(self._store.used_bytes / 2**20, 1), segments_given_up=numbers.evictions,
            corrupt=numbers.corrupt, records_without_room=numbers.refused, packs_not_kept=self.writer.not_kept,
        )  # fmt: skip


def describe_cached(target: TargetView) -> CachedTarget:
    """What the cache must know of a loaded target."""
    return CachedTarget(
        fingerprint=target.fingerprint,
        num_layers=target.config.num_layers,
        hidden_size=target.config.hidden_size,
        itemsize=target.dtype.itemsize,
        computes_documents=target.computes_any_length,
    )


def _write_rest(stream: ComputedStream, slot_index: int, pack: Pack) -> None:
    """What no forward computes: the tensors of the pack itself, and zeros behind the last document."""
    slot = stream.arena.slot(slot_index)
    specs = {spec.name: spec for spec in stream.layout.specs}
    host = tensors_of(pack)
    for name, tensor in host.items():
        write_tensor(slot, specs[name], tensor)
    for name in specs.keys() - host.keys():
        spec = specs[name]
        row_bytes = spec.size_bytes // spec.shape[0]
        slot[spec.offset_bytes + pack.num_tokens * row_bytes : spec.offset_bytes + spec.size_bytes] = 0
