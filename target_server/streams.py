"""Streams: a data specification becomes a sequence of packs, a layout and an arena, within the shelf's budget.

Runs of one stream may read different layers: its packs hold the union, and each run reads what it asked for. One that
brings a new layer gets the stream another arena, with larger slots; what lay in the old one is computed again.
"""

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path

import torch
from pydantic import ValidationError

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import MAX_EPOCHS, DataSpec
from slipstream.telemetry.logs import log_event
from slipstream.wire.arena import PayloadArena
from slipstream.wire.codec import LayoutEntry, plan_layout
from slipstream.wire.page_lock import lock_pages
from slipstream.wire.tensor_names import LAST_HIDDEN_STATE, hidden_state_name
from target_server.data_files import file_stamp, find_files
from target_server.dataset import Dataset, load_documents
from target_server.packing import PackSequence
from target_server.record_files import SourceFile
from target_server.shelf import Shelf
from target_server.stream import Stream
from target_server.stream_layers import Layers
from target_server.stream_shelves import StreamShelves
from target_server.subscription import SubscriptionTerms
from target_server.target_view import TargetView

MIN_SLOTS = 4
"""Two for each of two runs that are far apart."""
MAX_SLOTS = 16
"""More than any trainer prefetches; what is left of the budget is for other streams."""

_log = logging.getLogger(__name__)


class StreamCatalog:
    """Opens streams and gives the memory of idle ones back. Thread-safe."""

    def __init__(
        self,
        target: TargetView,
        shelves: StreamShelves,
        *,
        shelf_bytes: int,
        shm_dir: Path | None,
        data_roots: Sequence[Path] | None,
        on_drop: Callable[[PayloadArena], None] | None = None,
    ) -> None:
        """
        Args:
            target: whose tokenizer, layers and dtype the streams have.
            shelves: where every stream gets one.
            shelf_bytes: budget of all streams together.
            shm_dir: where arenas live; None for memory of this process only.
            data_roots: directories that conversation files must lie in; None allows every path.
            on_drop: called before an arena's memory is given back, for whoever else has mapped it.
        """
        self._on_drop = on_drop
        self._target = target
        self._shelves = shelves
        self._shelf_bytes = shelf_bytes
        self._shm_dir = shm_dir
        self._data_roots = data_roots
        self._opening = threading.Lock()
        self._streams: dict[str, Stream] = {}
        self._by_source: dict[str, str] = {}

    def get(self, name: str) -> Stream:
        """A stream that is on a shelf."""
        return self._streams[name]

    def serves(self, name: str, terms: SubscriptionTerms) -> bool:
        """Whether the stream is on a shelf, with everything that a run reads."""
        stream = self._streams.get(name)
        return stream is not None and stream.layers.cover(Layers.of(terms))

    def open(self, terms: SubscriptionTerms, *, wait: bool = True) -> Stream:
        """The stream of a data specification; reads and tokenizes the data when it is not on a shelf.

        Args:
            terms: what a run asks for.
            wait: for a stream that another caller opens just now, which may take minutes.

        Raises:
            SlipstreamError: SPEC_INVALID, DATA_INVALID, PATH_NOT_ALLOWED; TARGET_INCOMPATIBLE for layers that the
                target has not; OUT_OF_MEMORY when the shelf's budget does not hold one more stream, or one more layer;
                TARGET_LOADING without `wait`.
        """
        spec = parse_data_spec(terms.data_spec_json)
        self._check_layers(terms)
        files = find_files(spec.files, self._data_roots)
        with self._one_at_a_time(wait):
            source = _source_key(spec, files)
            name = self._by_source.get(source)
            stream = self._streams[name] if name is not None else self._load(spec, files, terms)
            if not stream.layers.cover(Layers.of(terms)):
                stream = self._widen(stream, terms)
            self._by_source[source] = stream.name
            return stream

    def check_room(self, pack_tokens: int) -> None:
        """Refuse a budget that holds no stream with such packs, however few layers a run reads.

        Raises:
            SlipstreamError: OUT_OF_MEMORY.
        """
        pack_bytes = plan_layout(self._layout_entries(pack_tokens, Layers((), last_hidden_state=True))).size_bytes
        if self._affordable_slots(pack_bytes) < MIN_SLOTS:
            raise self._no_room(pack_bytes)

    def close(self) -> None:
        """Give all memory back."""
        with self._opening:
            for name in list(self._streams):
                self._drop(name)

    @contextmanager
    def _one_at_a_time(self, wait: bool) -> Iterator[None]:
        if not self._opening.acquire(blocking=wait):
            raise SlipstreamError(
                "The target server reads the data of a run.",
                reason=Reason.TARGET_LOADING,
                remedy="Wait: what was read once is opened at once the next time.",
            )
        try:
            yield
        finally:
            self._opening.release()

    def _load(self, spec: DataSpec, files: Sequence[SourceFile], terms: SubscriptionTerms) -> Stream:
        dataset = load_documents(spec, self._target.tokenizer, files=files, split="train")
        self._check_lengths(dataset)
        name = _stream_name(spec, dataset.content_hash, self._target.fingerprint)
        known = self._streams.get(name)  # the same content under another path
        if known is not None:
            return known
        sequence = PackSequence(
            dataset.documents,
            pack_tokens=spec.pack_tokens,
            seed=spec.seed,
            window_documents=spec.window_documents,
        )
        layers = Layers.of(terms)
        layout = plan_layout(self._layout_entries(spec.pack_tokens, layers))
        arena = self._make_arena(self._make_room(layout.size_bytes), layout.size_bytes)
        report = dataset.report.model_dump_json()
        return self._add(Stream(name, layers, sequence, layout, arena, report, spec.pack_tokens))

    def _add(self, stream: Stream) -> Stream:
        """Put a stream on a shelf."""
        self._streams[stream.name] = stream
        self._shelves.add(stream.name, _shelf_of(stream), MAX_EPOCHS * stream.sequence.total_packs(1))
        _log_opened(stream)
        return stream

    def _widen(self, stream: Stream, terms: SubscriptionTerms) -> Stream:
        """The stream with the layers of one more run; with those alone where no other run uses it.

        Raises:
            SlipstreamError: OUT_OF_MEMORY, ENVIRONMENT_UNSUPPORTED, TARGET_LOADING; the stream is then as it was.
        """
        if self._shelves.retire(stream.name):
            self._drop(stream.name)
            layers = Layers.of(terms)
            layout = plan_layout(self._layout_entries(stream.pack_tokens, layers))
            arena = self._make_arena(self._make_room(layout.size_bytes), layout.size_bytes)
            return self._add(stream.on(arena, layout, layers))
        layers = stream.layers.joined(Layers.of(terms))
        layout = plan_layout(self._layout_entries(stream.pack_tokens, layers))
        slots = self._make_room(layout.size_bytes, instead_of=stream)

        def make() -> Shelf:
            self._release(stream)
            try:
                made = stream.on(self._make_arena(slots, layout.size_bytes), layout, layers)
            except SlipstreamError as error:
                refused.append(error)
                arena = self._make_arena(stream.arena.num_slots, stream.layout.size_bytes)
                made = stream.on(arena, stream.layout, stream.layers)
            self._streams[stream.name] = made
            return _shelf_of(made)

        refused: list[SlipstreamError] = []
        try:
            self._shelves.exchange(stream.name, make)
        except BaseException:
            if stream.arena.is_closed:
                self._forget(stream.name)
            raise
        if refused:
            raise refused[0]
        _log_opened(self._streams[stream.name])
        return self._streams[stream.name]

    def _drop(self, name: str) -> None:
        self._release(self._streams[name])
        self._forget(name)

    def _forget(self, name: str) -> None:
        del self._streams[name]
        self._by_source = {source: stream for source, stream in self._by_source.items() if stream != name}

    def _release(self, stream: Stream) -> None:
        if self._on_drop is not None:
            self._on_drop(stream.arena)
        stream.close()

    def _make_room(self, pack_bytes: int, instead_of: Stream | None = None) -> int:
        """Slots that a stream with such packs may have, in the place of another one; idle ones are dropped for it."""
        slots = self._affordable_slots(pack_bytes, instead_of)
        for name in list(self._streams):
            if slots >= MIN_SLOTS:
                break
            if self._streams[name] is not instead_of and self._shelves.retire(name):
                self._drop(name)
                slots = self._affordable_slots(pack_bytes, instead_of)
        if slots < MIN_SLOTS:
            raise self._no_room(pack_bytes)
        return min(slots, MAX_SLOTS)

    def _make_arena(self, slots: int, pack_bytes: int) -> PayloadArena:
        arena = PayloadArena.create(slots, pack_bytes, directory=self._shm_dir)
        if self._target.device.type == "cuda":
            lock_pages(arena.slots(), effect="copies from the GPU are about three times slower")
        return arena

    def _affordable_slots(self, pack_bytes: int, instead_of: Stream | None = None) -> int:
        freed = _size_of(instead_of) if instead_of is not None else 0
        return (self._shelf_bytes - self._used_bytes() + freed) // pack_bytes

    def _used_bytes(self) -> int:
        return sum(_size_of(stream) for stream in self._streams.values())

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

    def _layout_entries(self, pack_tokens: int, layers: Layers) -> list[LayoutEntry]:
        names = [hidden_state_name(layer) for layer in layers.ids]
        if layers.last_hidden_state:
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


def _size_of(stream: Stream) -> int:
    return stream.arena.num_slots * stream.arena.slot_bytes


def _shelf_of(stream: Stream) -> Shelf:
    return Shelf(stream.arena.num_slots, stream.arena.slot_bytes, pack_cost=stream.pack_tokens)


def _log_opened(stream: Stream) -> None:
    log_event(
        _log, "info", "stream_opened", stream=stream.name, layers=stream.layer_ids,
        last_hidden_state=stream.last_hidden_state, slots=stream.arena.num_slots,
        pack_mib=round(stream.layout.size_bytes / 2**20, 2),
    )  # fmt: skip


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.1f} MiB"
