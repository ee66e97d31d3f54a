"""④→⑤ Keeps one engine process alive and busy: two packs in flight, and what a dead engine leaves is put in order.

Two threads. One hands packs over as soon as there is demand and room; the other listens to the engine, and when that
has died it waits until the last of its processes is gone, gives its slots back and starts it again.
"""

import itertools
import logging
import selectors
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.telemetry.logs import log_event
from target_server.engine_arena import layout_fields, repair, segment_of
from target_server.engine_line import Message
from target_server.engine_process import pack_message
from target_server.engine_ranks import Ending, Engine, RankProcess
from target_server.packing import Pack
from target_server.producer import Assignments, Throughput
from target_server.shelf import PackFacts
from target_server.stream import Stream
from target_server.streams import StreamCatalog
from target_server.suspects import PackKey, Suspects
from target_server.work_queue import Work

PACKS_IN_FLIGHT = 2
"""One that is computed, one that waits: an engine is never idle between packs."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 60.0
"""Seconds before an engine that has died is started again; each death in a row doubles them."""
_HEALTHY_SECONDS = 60.0
"""An engine that was ready for so long was no failed attempt, even where nobody wanted a pack."""
SILENT_SECONDS = 60.0
"""An engine that has had a pack for so long without a word is named in the log, and again after as long. It is not
ended: it may compile, or the target be slow."""

_log = logging.getLogger(__name__)


class Crew(Protocol):
    """What keepers share: see EnginePool."""

    suspects: Suspects
    throughput: Throughput
    closed: threading.Event

    def new_engine(self, index: int) -> tuple[Engine, list[Message]]:
        """Start the processes of an engine, and what each rank must be told first."""

    def on_ready(self, facts: dict[str, Any]) -> None:
        """An engine is ready."""

    def on_down(self, keeper: "EngineKeeper", refusal: SlipstreamError | None, words: str) -> None:
        """An engine has gone."""


@dataclass(frozen=True)
class _Ordered:
    """A pack that the engine has been told to compute."""

    work: Work
    pack: Pack
    stream: Stream
    since: float = field(default_factory=time.monotonic)


class EngineKeeper:
    """One of a server's engines."""

    _queue: Assignments

    def __init__(self, index: int, crew: Crew) -> None:
        self.index = index
        self.deaths = 0
        """In a row, without a pack in between."""
        self.was_ready = False
        self._crew = crew
        self._changed = threading.Condition()
        self._engine: Engine | None = None
        """While it is ready."""
        self._current: Engine | None = None
        """While it has processes."""
        self._in_flight: OrderedDict[PackKey, _Ordered] = OrderedDict()
        self._asked: dict[int, Future[Message | None]] = {}
        self._numbers = itertools.count()
        self._packs = 0

    @property
    def is_ready(self) -> bool:
        """Whether the engine takes packs."""
        return self._engine is not None

    # The listening thread

    def keep(self) -> None:
        """Start the engine, and again when it has died, until the crew is closed."""
        while not self._crew.closed.is_set():
            engine, begin = self._crew.new_engine(self.index)
            with self._changed:
                self._current = engine
            if self._crew.closed.is_set():
                engine.hang_up()  # `close` may have looked before
            engine.begin(begin)
            ready_since, refusal = self._listen(engine)
            self._put_in_order(engine, ready_since, refusal)
            self._crew.closed.wait(self._pause())

    def close(self) -> None:
        """The crew is closed: the engine leaves."""
        with self._changed:
            if self._current is not None:
                self._current.hang_up()
            self._changed.notify_all()

    def _pause(self) -> float:
        return min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** max(0, self.deaths - 1))

    def _listen(self, engine: Engine) -> tuple[float | None, SlipstreamError | None]:
        """Until one of its processes is gone; since when it was ready, and why it refused to go on, if it said so."""
        loading, ready_since, facts = set(engine.ranks), None, dict[str, Any]()
        with selectors.DefaultSelector() as selector:
            for process in engine.ranks:
                selector.register(process.line, selectors.EVENT_READ, process)
            while True:
                heard = selector.select(SILENT_SECONDS)
                if not heard:
                    self._note_silence(engine)
                for key, _ in heard:
                    rank: RankProcess = key.data
                    message = rank.line.receive()
                    if message is None:
                        return ready_since, None
                    if message.kind == "refused":
                        return ready_since, _refusal(message, engine.name)
                    if message.kind != "ready":
                        self._heard(message)
                        continue
                    loading.discard(rank)
                    if rank is engine.ranks[0]:
                        facts = dict(message.fields)
                    if not loading:
                        ready_since = time.monotonic()
                        self._begin_service(engine, facts)

    def _note_silence(self, engine: Engine) -> None:
        with self._changed:
            waiting = list(self._in_flight.values())
        seconds = time.monotonic() - min((ordered.since for ordered in waiting), default=float("inf"))
        if seconds < SILENT_SECONDS:
            return
        log_event(
            _log, "warning", "engine_silent", engine=engine.name, pids=[rank.pid for rank in engine.ranks],
            packs=[ordered.work.sequence_number for ordered in waiting], seconds=round(seconds),
            effect="runs wait that need these packs",
            remedy="if it neither compiles nor computes, kill its processes: it is started again, and loses no pack",
        )  # fmt: skip

    def _begin_service(self, engine: Engine, facts: dict[str, Any]) -> None:
        self.was_ready = True
        self._set_ready(engine)
        log_event(_log, "info", "engine_ready", engine=engine.name)
        self._crew.on_ready(facts)

    def _set_ready(self, engine: Engine | None) -> None:
        with self._changed:
            self._engine = engine
            self._changed.notify_all()

    def _heard(self, message: Message) -> None:
        if message.kind == "done":
            self._asked.pop(message.fields["of"]).set_result(message)
            return
        key = (message.fields["stream"], message.fields["number"])
        ordered = self._in_flight[key]
        self._conclude(ordered, finite=message.fields["finite"])
        with self._changed:
            del self._in_flight[key]
            self._changed.notify_all()

    def _conclude(self, ordered: _Ordered, *, finite: bool) -> None:
        work, pack, stream = ordered.work, ordered.pack, ordered.stream
        self.deaths, self._packs = 0, self._packs + 1
        self._crew.suspects.clear((work.stream, work.sequence_number))
        if not finite:
            self._queue.quarantine(work, pack.document_names)
            return
        generation = stream.arena.generation(work.slot.index)
        self._queue.publish(work, PackFacts(pack.num_tokens, pack.num_supervised, generation))
        self._crew.throughput.note(stream.name, stream.pack_tokens)

    def _put_in_order(self, engine: Engine, ready_since: float | None, refusal: SlipstreamError | None) -> None:
        """The engine has gone: its packs are nobody's, and nobody waits for its answers."""
        self._set_ready(None)
        ending = engine.end()
        with self._changed:
            self._current = None
            lost, self._in_flight = list(self._in_flight.values()), OrderedDict()
            asked, self._asked = list(self._asked.values()), {}
            self._changed.notify_all()
        for future in asked:
            future.set_result(None)
        closed = self._crew.closed.is_set()
        if not closed:
            self._note_death(engine, ending, ready_since, lost)
        # What says why it cannot go on, for want of memory perhaps, has not met a pack that is at fault.
        crashed = ending.crashed and refusal is None and not closed
        for ordered in lost:
            self._give_back(ordered, crashed, ending.words, alone=len(lost) == 1)
        if not closed:
            self._crew.on_down(self, refusal, ending.words)

    def _note_death(self, engine: Engine, ending: Ending, ready_since: float | None, lost: list[_Ordered]) -> None:
        healthy = ready_since is not None and time.monotonic() - ready_since >= _HEALTHY_SECONDS
        self.deaths = 1 if healthy else self.deaths + 1
        numbers = [ordered.work.sequence_number for ordered in lost]
        log_event(
            _log, "warning", "engine_died", engine=engine.name, why=ending.words, packs_lost=numbers,
            packs_computed=self._packs, deaths_in_a_row=self.deaths, starts_again_in=self._pause(),
        )  # fmt: skip

    def _give_back(self, ordered: _Ordered, crashed: bool, words: str, *, alone: bool) -> None:
        """To the queue; or set aside, when it has certainly ended an engine twice."""
        work = ordered.work
        repair(ordered.stream.arena, work.slot.index)
        key = (work.stream, work.sequence_number)
        if crashed and self._crew.suspects.accuse(key, alone=alone):
            why = f"it has crashed its engine twice: {words}"
            self._queue.quarantine(work, ordered.pack.document_names, why)
        else:
            self._queue.abandon(work)

    # The feeding thread

    def feed(self, queue: Assignments, catalog: StreamCatalog) -> None:
        """Hand packs over until the queue is closed."""
        self._queue = queue
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._has_room() or self._crew.closed.is_set())
            work = None if self._crew.closed.is_set() else queue.next_work()
            if work is None:
                return
            stream = catalog.get(work.stream)
            self._hand_over(_Ordered(work, stream.sequence.pack(work.sequence_number), stream))

    def _has_room(self) -> bool:
        return self._engine is not None and len(self._in_flight) < PACKS_IN_FLIGHT

    def _hand_over(self, ordered: _Ordered) -> None:
        key = (ordered.work.stream, ordered.work.sequence_number)
        alone = self._crew.suspects.includes(key)
        with self._changed:
            self._changed.wait_for(lambda: self._engine is None or not (alone and self._in_flight))
            engine = self._engine
            if engine is not None:
                self._in_flight[key] = ordered
        if engine is None:  # it died while there was nothing to do
            self._queue.abandon(ordered.work)
            return
        engine.order(_pack_order(ordered))
        if alone:
            with self._changed:
                self._changed.wait_for(lambda: key not in self._in_flight)

    # Any thread

    def ask(self, kind: str, fields: dict[str, Any], *, timeout: float | None = None) -> Message | None:
        """Have the engine do something between packs; None: it died before.

        Raises:
            TimeoutError: it is busy.
        """
        number, future = next(self._numbers), Future[Message | None]()
        with self._changed:
            engine = self._engine
            if engine is None:
                return None
            self._asked[number] = future
        engine.order(Message(kind, {"id": number, **fields}))
        return future.result(timeout)


def _pack_order(ordered: _Ordered) -> Message:
    stream = ordered.stream
    fields, blob = pack_message(ordered.pack)
    fields |= {
        "stream": stream.name,
        "slot": ordered.work.slot.index,
        "documents": ordered.work.documents,
        "segment": segment_of(stream.arena),
        "layers": stream.layer_ids,
        "last_hidden_state": stream.last_hidden_state,
        "pack_tokens": stream.pack_tokens,
        "layout": layout_fields(stream.layout),
        "size_bytes": stream.layout.size_bytes,
    }
    return Message("pack", fields, blob)


def _refusal(message: Message, engine: str) -> SlipstreamError:
    fields = message.fields
    return SlipstreamError(f"{engine}: {fields['message']}", reason=Reason(fields["reason"]), remedy=fields["remedy"])
