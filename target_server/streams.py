"""Streams: a data specification becomes a sequence of packs, a layout and an arena, within the shelf's budget."""

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path

import torch
from pydantic import ValidationError

from slipstream.errors import SlipstreamError
from slipstream.hidden_states.v1 import batch_pb2, tensor_pb2
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import DataSpec
from slipstream.telemetry.logs import log_event
from slipstream.wire.arena import PayloadArena
from slipstream.wire.codec import LayoutEntry, PayloadLayout, checksum, plan_layout
from slipstream.wire.page_lock import lock_pages, unlock_pages
from slipstream.wire.tensor_names import LAST_HIDDEN_STATE, hidden_state_name
from target_server.data_files import file_stamp, find_files
from target_server.dataset import Dataset, load_documents
from target_server.lease_ledger import LeaseLedger
from target_server.packing import PackSequence
from target_server.record_files import SourceFile
from target_server.shelf import PackFacts, Shelf
from target_server.subscription import SubscriptionTerms
from target_server.target_view import TargetView

MIN_SLOTS = 4
"""Two for each of two runs that are far apart."""
MAX_EPOCHS = 10_000
"""Of one run. A pack far ahead is found by planning every epoch before it."""
MAX_SLOTS = 16
"""More than any trainer prefetches; what is left of the budget is for other streams."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stream:
    """One stream that is on a shelf."""

    name: str
    layer_ids: tuple[int, ...]
    last_hidden_state: bool
    sequence: PackSequence
    layout: PayloadLayout
    arena: PayloadArena
    data_report_json: str
    pack_tokens: int
    _checksums: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)

    def end(self, max_epochs: int) -> int | None:
        """One past the last pack of so many epochs; None for 0, which means for ever."""
        return self.sequence.total_packs(max_epochs) if max_epochs else None

    def manifest(
        self, sequence_number: int, slot_index: int, facts: PackFacts, *, checksums: bool
    ) -> batch_pb2.PackManifest:
        """What a trainer must know of a pack; `checksums` for a transport that needs them."""
        specs = self.layout.specs
        if checksums:
            sums = self._checksums_of(slot_index, facts.generation)
            specs = tuple(_with_checksum(spec, value) for spec, value in zip(specs, sums, strict=True))
        return batch_pb2.PackManifest(
            sequence_number=sequence_number,
            tensors=specs,
            payload_size_bytes=self.layout.size_bytes,
            num_tokens=facts.num_tokens,
            num_supervised_tokens=facts.num_supervised_tokens,
        )

    def locations(self, slot_index: int) -> tuple[batch_pb2.PayloadLocation, ...]:
        """Where a slot's payload can be read."""
        return payload_locations(self.arena, slot_index)

    def _checksums_of(self, slot_index: int, generation: int) -> tuple[int, ...]:
        """Computed once per content of a slot, and only when a reader needs them."""
        known = self._checksums.get(slot_index)
        if known is not None and known[0] == generation:
            return known[1]
        slot = self.arena.slot(slot_index)
        sums = tuple(
            checksum(slot[spec.offset_bytes : spec.offset_bytes + spec.size_bytes]) for spec in self.layout.specs
        )
        if self.arena.generation(slot_index) == generation:
            self._checksums[slot_index] = (generation, sums)
        return sums


def payload_locations(arena: PayloadArena, slot_index: int) -> tuple[batch_pb2.PayloadLocation, ...]:
    """gRPC always; shared memory where the arena lies in it."""
    locations = [batch_pb2.PayloadLocation(grpc=batch_pb2.GrpcLocation())]
    shared = arena.location(slot_index)
    if shared is not None:
        locations.insert(0, batch_pb2.PayloadLocation(shared_memory=shared))
    return tuple(locations)


class StreamCatalog:
    """Opens streams and gives the memory of idle ones back. Thread-safe."""

    def __init__(
        self,
        target: TargetView,
        ledger: LeaseLedger,
        *,
        shelf_bytes: int,
        shm_dir: Path | None,
        data_roots: Sequence[Path] | None,
        on_drop: Callable[[PayloadArena], None] | None = None,
    ) -> None:
        """
        Args:
            target: whose tokenizer, layers and dtype the streams have.
            ledger: gets a shelf for every stream.
            shelf_bytes: budget of all streams together.
            shm_dir: where arenas live; None for memory of this process only.
            data_roots: directories that conversation files must lie in; None allows every path.
            on_drop: called before an arena's memory is given back, for whoever else has mapped it.
        """
        self._on_drop = on_drop
        self._target = target
        self._ledger = ledger
        self._shelf_bytes = shelf_bytes
        self._shm_dir = shm_dir
        self._data_roots = data_roots
        self._opening = threading.Lock()
        self._streams: dict[str, Stream] = {}
        self._by_source: dict[str, str] = {}

    def get(self, name: str) -> Stream:
        """A stream that is on a shelf."""
        return self._streams[name]

    def open(self, terms: SubscriptionTerms) -> Stream:
        """The stream of a data specification; reads and tokenizes the data when it is not on a shelf.

        Raises:
            SlipstreamError: SPEC_INVALID, DATA_INVALID, PATH_NOT_ALLOWED; TARGET_INCOMPATIBLE for layers that the
                target has not, or that differ from those of the stream's other runs; OUT_OF_MEMORY when the shelf's
                budget does not hold one more stream.
        """
        spec = parse_data_spec(terms.data_spec_json)
        self._check_layers(terms)
        files = find_files(spec.files, self._data_roots)
        with self._opening:
            source = _source_key(spec, files)
            name = self._by_source.get(source)
            if name is not None:
                stream = self._streams[name]
                if self._same_layers(stream, terms):
                    return stream
            return self._load(spec, files, terms, source)

    def close(self) -> None:
        """Give all memory back."""
        with self._opening:
            for name in list(self._streams):
                self._drop(name)

    def _load(self, spec: DataSpec, files: Sequence[SourceFile], terms: SubscriptionTerms, source: str) -> Stream:
        dataset = load_documents(spec, self._target.tokenizer, files=files, split="train")
        self._check_lengths(dataset)
        name = _stream_name(spec, dataset.content_hash, self._target.fingerprint)
        known = self._streams.get(name)  # the same content under another path
        if known is None or not self._same_layers(known, terms):
            sequence = PackSequence(
                dataset.documents,
                pack_tokens=spec.pack_tokens,
                seed=spec.seed,
                window_documents=spec.window_documents,
            )
            layout = plan_layout(self._layout_entries(spec.pack_tokens, terms))
            arena = self._make_arena(layout)
            known = Stream(
                name=name,
                layer_ids=terms.layer_ids,
                last_hidden_state=terms.last_hidden_state,
                sequence=sequence,
                layout=layout,
                arena=arena,
                data_report_json=dataset.report.model_dump_json(),
                pack_tokens=spec.pack_tokens,
            )
            self._streams[name] = known
            horizon = MAX_EPOCHS * sequence.total_packs(1)
            self._ledger.add_stream(name, Shelf(arena.num_slots, arena.slot_bytes), horizon)
            log_event(
                _log, "info", "stream_opened", stream=name, layers=terms.layer_ids, slots=arena.num_slots,
                pack_mib=round(layout.size_bytes / 2**20, 2),
            )  # fmt: skip
        self._by_source[source] = name
        return known

    def _same_layers(self, stream: Stream, terms: SubscriptionTerms) -> bool:
        """True when the stream fits; False when it did not and is gone now, because nobody used it."""
        theirs, ours = (stream.layer_ids, stream.last_hidden_state), (terms.layer_ids, terms.last_hidden_state)
        if theirs == ours:
            return True
        if not self._ledger.retire_stream(stream.name):
            raise SlipstreamError(
                f"{stream.name} is served with {_layers_in_words(*theirs)}; run {terms.run} asks for "
                f"{_layers_in_words(*ours)}.",
                reason=Reason.TARGET_INCOMPATIBLE,
                remedy="Runs that share a stream read the same layers: set the same drafter.target_layer_ids, give "
                "this run another data.seed, or serve it from another target server.",
            )
        self._drop(stream.name)
        return False

    def _drop(self, name: str) -> None:
        arena = self._streams.pop(name).arena
        self._by_source = {source: stream for source, stream in self._by_source.items() if stream != name}
        if self._on_drop is not None:
            self._on_drop(arena)
        unlock_pages(arena.slots())
        arena.close()

    def _make_arena(self, layout: PayloadLayout) -> PayloadArena:
        slots = self._affordable_slots(layout.size_bytes)
        for name in list(self._streams):
            if slots >= MIN_SLOTS:
                break
            if self._ledger.retire_stream(name):
                self._drop(name)
                slots = self._affordable_slots(layout.size_bytes)
        if slots < MIN_SLOTS:
            raise self._no_room(layout.size_bytes)
        arena = PayloadArena.create(min(slots, MAX_SLOTS), layout.size_bytes, directory=self._shm_dir)
        if self._target.device.type == "cuda":
            lock_pages(arena.slots(), effect="copies from the GPU are about three times slower")
        return arena

    def _affordable_slots(self, pack_bytes: int) -> int:
        return (self._shelf_bytes - self._used_bytes()) // pack_bytes

    def _used_bytes(self) -> int:
        return sum(stream.arena.num_slots * stream.arena.slot_bytes for stream in self._streams.values())

    def _no_room(self, pack_bytes: int) -> SlipstreamError:
        used = self._used_bytes()
        taken = f", of which {len(self._streams)} other streams use {_mib(used)}" if used else ""
        return SlipstreamError(
            f"The shelf has {_mib(self._shelf_bytes)}{taken}; a stream with packs of {_mib(pack_bytes)} needs at least "
            f"{MIN_SLOTS} of them, {_mib(MIN_SLOTS * pack_bytes)}.",
            reason=Reason.OUT_OF_MEMORY,
            remedy="Start the target server with a larger --shelf-bytes, use smaller data.pack_tokens or fewer layers, "
            "or close runs on other data.",
        )

    def _layout_entries(self, pack_tokens: int, terms: SubscriptionTerms) -> list[LayoutEntry]:
        names = [hidden_state_name(layer) for layer in terms.layer_ids]
        if terms.last_hidden_state:
            names.append(LAST_HIDDEN_STATE)
        shape = (pack_tokens, self._target.config.hidden_size)
        entries: list[LayoutEntry] = [
            ("input_ids", torch.int32, (pack_tokens,)),
            ("loss_mask", torch.uint8, (pack_tokens,)),
            ("document_ids", torch.int32, (pack_tokens,)),
            ("position_ids", torch.int32, (pack_tokens,)),
        ]
        return entries + [(name, self._target.dtype, shape) for name in names]

    def _check_layers(self, terms: SubscriptionTerms) -> None:
        if not terms.layer_ids and not terms.last_hidden_state:
            raise SlipstreamError(f"Run {terms.run} asks for no layer.", reason=Reason.SPEC_INVALID)
        self._target.check_layers(terms.layer_ids)

    def _check_lengths(self, dataset: Dataset) -> None:
        """The engine must never meet a document that it cannot compute."""
        longest, limit = int(dataset.documents.lengths.max()), self._target.max_document_tokens
        if longest > limit:
            raise SlipstreamError(
                f"A document has {longest} tokens; {self._target.model_id} is only right up to {limit}.",
                reason=Reason.DATA_INVALID,
                remedy=f"Set data.max_document_tokens to at most {limit}.",
            )


def parse_data_spec(text: str) -> DataSpec:
    """Read the DataSpec that a trainer sent.

    Raises:
        SlipstreamError: SPEC_INVALID.
    """
    try:
        return DataSpec.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, ("data", *first["loc"])))
        raise SlipstreamError(
            f"The run's data specification is not valid: {where}: {first['msg']}.",
            reason=Reason.SPEC_INVALID,
            remedy="Trainer and target server must be of the same version of Slipstream.",
        ) from error


def _source_key(spec: DataSpec, files: Sequence[SourceFile]) -> str:
    """Changes when a file does, so that a changed file is read again."""
    stamps = [(str(file.path), file.name, *astuple(file_stamp(file.path))) for file in files]
    return json.dumps([spec.model_dump(mode="json", exclude={"files"}), stamps], sort_keys=True)


def _stream_name(spec: DataSpec, content_hash: str, fingerprint: str) -> str:
    """The identity of a stream: everything that decides what its packs hold, except the layers."""
    identity = [
        content_hash,
        spec.seed,
        spec.pack_tokens,
        spec.window_documents,
        spec.max_document_tokens or spec.pack_tokens,
        spec.heldout_fraction,
        fingerprint,
    ]
    return "streams/" + hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]


def _with_checksum(spec: tensor_pb2.TensorSpec, value: int) -> tensor_pb2.TensorSpec:
    copy = tensor_pb2.TensorSpec()
    copy.CopyFrom(spec)
    copy.crc32c = value
    return copy


def _layers_in_words(layer_ids: tuple[int, ...], last_hidden_state: bool) -> str:
    return f"layers {list(layer_ids)}" + (" and the last hidden state" if last_hidden_state else "")


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.1f} MiB"
