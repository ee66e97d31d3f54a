"""⑥→⑤ The engine's queue with a cache before it: packs that lie on the disk are published without an engine."""

from dataclasses import replace

from target_server.packing import Pack
from target_server.producer import Assignments, ComputedStream, OpenStreams, Throughput
from target_server.shelf import PackFacts
from target_server.state_cache import StateCache
from target_server.state_cache_writer import StateRows
from target_server.work_queue import NOT_FINITE, Work


class CachedQueue:
    """What an engine asks and reports, as WorkQueue. Thread-safe."""

    def __init__(self, queue: Assignments, catalog: OpenStreams, cache: StateCache) -> None:
        self._queue = queue
        self._catalog = catalog
        self._cache = cache
        self.throughput: Throughput | None = None
        """Hears of the packs that no engine computes."""
        self._computed: dict[tuple[str, int, int], tuple[ComputedStream, list[StateRows]]] = {}
        """What engines are at, by stream, number and slot: the stream as it was then, and the pack's rows."""

    def next_work(self, max_wait: float = float("inf")) -> Work | None:
        """As WorkQueue, of packs that must be computed; None also where one was published instead, unless the caller
        would wait for ever."""
        while True:
            work = self._queue.next_work(max_wait)
            if work is None:
                return None
            left = self._recall(work)
            if left is not None:
                return left
            if max_wait != float("inf"):  # the caller has packs under way that must not wait for the disk
                return None

    def publish(self, work: Work, facts: PackFacts) -> None:
        """As WorkQueue; what was computed is offered to the disk."""
        computed = self._computed.pop(_place(work), None)
        if computed is not None:
            stream, rows = computed
            self._cache.keep(stream, work.slot.index, rows)
        self._queue.publish(work, facts)

    def quarantine(self, work: Work, document_names: tuple[str, ...], why: str = NOT_FINITE) -> None:
        """As WorkQueue."""
        self._computed.pop(_place(work), None)
        self._queue.quarantine(work, document_names, why)

    def abandon(self, work: Work) -> None:
        """As WorkQueue."""
        self._computed.pop(_place(work), None)
        self._queue.abandon(work)

    def _recall(self, work: Work) -> Work | None:
        """What is left to be computed; None when the pack was on the disk and is published."""
        try:
            stream = self._catalog.get(work.stream)
            pack = stream.sequence.pack(work.sequence_number)
            rows = self._cache.rows(stream, pack)
            missing = self._cache.recall(stream, work.slot.index, pack, rows)
        except BaseException:
            self._queue.abandon(work)
            raise
        if missing == ():
            self._publish(work, stream, pack)
            return None
        self._computed[_place(work)] = stream, rows
        return replace(work, documents=missing)

    def _publish(self, work: Work, stream: ComputedStream, pack: Pack) -> None:
        generation = stream.arena.generation(work.slot.index)
        self._queue.publish(work, PackFacts(pack.num_tokens, pack.num_supervised, generation))
        if self.throughput is not None:
            self.throughput.note(stream.name, stream.pack_tokens)


def _place(work: Work) -> tuple[str, int, int]:
    return work.stream, work.sequence_number, work.slot.index
