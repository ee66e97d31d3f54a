"""The engines of a server that runs them as processes: started, described, fed, kept alive, and ended with it."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.hidden_states.v1 import hidden_state_service_pb2 as pb
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import TargetSpec
from slipstream.target_files import TargetFiles, model_error
from slipstream.target_fingerprint import fingerprint_target
from slipstream.wire.arena import PayloadArena
from target_server.data_files import FileStamp, file_stamp
from target_server.engine_arena import layout_fields, read_layout, segment_of
from target_server.engine_keeper import EngineKeeper
from target_server.engine_line import Message
from target_server.engine_plan import EnginePlan
from target_server.engine_ranks import Engine
from target_server.fixed_payloads import FixedPayloadStore
from target_server.meeting_places import MeetingPlaces
from target_server.producer import Assignments, Throughput
from target_server.streams import StreamCatalog
from target_server.suspects import Suspects

DEATHS_ALLOWED = 4
"""In a row without a pack, of every engine: then the server ends."""
_FORGET_SECONDS = 60.0


@dataclass(frozen=True)
class EngineTerms:
    """What every engine of a server is told when it begins."""

    spec: TargetSpec
    files: TargetFiles
    fingerprint: str
    shm_dir: Path
    pack_tokens: int | None
    """What it gets ready for before it counts as ready."""


class EnginePool:
    """All engines of a server. Thread-safe; `run` waits for the end."""

    def __init__(self, plan: EnginePlan, terms: EngineTerms, on_living: Callable[[int], None]) -> None:
        """`on_living`: hears how many engines are ready, whenever that changes."""
        self.suspects = Suspects()
        self.throughput = Throughput()
        self.closed = threading.Event()
        self._plan = plan
        self._terms = terms
        self._on_living = on_living
        self._stamps = _stamps(terms.files)
        self._meeting_places = MeetingPlaces()
        self._changed = threading.Condition()
        self._facts: dict[str, Any] | None = None
        self._failure: BaseException | None = None
        self._keepers = [EngineKeeper(index, self) for index in range(len(plan.devices))]
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start all engines."""
        for keeper in self._keepers:
            self._in_thread(f"engine-{keeper.index}", keeper.keep)

    def wait_ready(self) -> dict[str, Any]:
        """What the first engine that is ready says of the target.

        Raises:
            SlipstreamError: an engine refused, or none could be started.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._facts is not None or self.closed.is_set())
            self._raise_failure()
            if self.closed.is_set():
                raise SlipstreamError("The server was ended while it loaded.", reason=Reason.TARGET_DRAINING)
            assert self._facts is not None
            return self._facts

    def add_frozen_weights(self, fixed: FixedPayloadStore) -> pb.FixedPayload:
        """Have an engine write them into shared memory of the server's.

        Raises:
            SlipstreamError: as `wait_ready`; ENVIRONMENT_UNSUPPORTED when the memory is not there.
        """
        while True:
            self.wait_ready()
            for keeper in self._keepers:
                described = keeper.ask("describe_frozen_weights", {})
                if described is None:
                    continue
                layout = read_layout(described.fields["layout"], described.fields["size_bytes"])
                fields = {"layout": layout_fields(layout), "size_bytes": layout.size_bytes}

                def write(arena: PayloadArena, keeper: EngineKeeper = keeper, fields: dict[str, Any] = fields) -> bool:
                    return keeper.ask("write_frozen_weights", {"segment": segment_of(arena), **fields}) is not None

                payload = fixed.add_written("frozen_weights", layout, write)
                if payload is not None:
                    return payload
            with self._changed:
                # An engine was ready and has died since.
                self._changed.wait_for(lambda: any(each.is_ready for each in self._keepers) or self.closed.is_set())

    def serve(self, queue: Assignments, catalog: StreamCatalog) -> None:
        """Begin to compute what the queue asks for."""
        for keeper in self._keepers:
            self._in_thread(f"feeder-{keeper.index}", partial(keeper.feed, queue, catalog))

    def run(self) -> None:
        """Until `close`.

        Raises:
            SlipstreamError: the engines cannot go on.
        """
        self.closed.wait()
        with self._changed:
            self._raise_failure()

    def forget(self, arena: PayloadArena) -> None:
        """Engines give the arena's memory back, before it is the server's to use again; nothing is written into it."""
        for keeper in self._keepers:
            try:
                keeper.ask("forget", {"segment": segment_of(arena)}, timeout=_FORGET_SECONDS)
            except TimeoutError:  # it compiles, perhaps: the memory comes back later
                continue

    def close(self) -> None:
        """Every engine leaves; waits until they have. Idempotent."""
        self.closed.set()
        with self._changed:
            self._changed.notify_all()
        for keeper in self._keepers:
            keeper.close()
        for thread in self._threads:
            if thread is not threading.current_thread() and thread.name.startswith("engine"):
                thread.join()
        self._meeting_places.close()

    # What keepers ask and report: see Crew

    def new_engine(self, index: int) -> tuple[Engine, list[Message]]:
        """As Crew.

        Raises:
            SlipstreamError: MODEL_INVALID, the target's files are not those that the server hashed.
        """
        self._check_files()
        engine = Engine(index, self._plan)
        with self._changed:
            meeting_place = self._meeting_places.next()
        devices = self._plan.devices[index]
        return engine, [self._begin(rank, device, meeting_place) for rank, device in enumerate(devices)]

    def _check_files(self) -> None:
        """An engine that is started later must load what the others have; files may have been touched, not changed."""
        terms, stamps = self._terms, _stamps(self._terms.files)
        if stamps == self._stamps:
            return
        if fingerprint_target(terms.files, terms.spec.dtype) != terms.fingerprint:
            raise model_error(
                f"The files of {terms.spec.model!r} have changed since this server was started, so an engine that has "
                "died cannot be started again.",
                "Put the old files back, or start the server again with the new ones: to trainers that is another "
                "target.",
            )
        self._stamps = stamps

    def _begin(self, rank: int, device: str, meeting_place: Path) -> Message:
        terms = self._terms
        fields = {
            "target": terms.spec.model_dump_json(),
            "fingerprint": terms.fingerprint,
            # It sees no other GPU than its own.
            "device": device.partition(":")[0],
            "pack_tokens": terms.pack_tokens,
            "shm_dir": str(terms.shm_dir),
            "rank": rank,
            "ranks": self._plan.ranks,
            "rendezvous": str(meeting_place),
        }
        return Message("begin", fields)

    def on_ready(self, facts: dict[str, Any]) -> None:
        """As Crew."""
        with self._changed:
            self._facts = self._facts or facts
            self._changed.notify_all()
        self._tell_living()

    def on_down(self, keeper: EngineKeeper, refusal: SlipstreamError | None, words: str) -> None:
        """As Crew: ends the server where it makes no sense to go on."""
        self._tell_living()
        if refusal is not None and not keeper.was_ready:
            self._fail(refusal)
        elif all(each.deaths >= DEATHS_ALLOWED for each in self._keepers):
            self._fail(
                refusal
                or SlipstreamError(
                    f"Every engine has died {DEATHS_ALLOWED} times in a row without computing a pack. {words}",
                    reason=Reason.INTERNAL,
                    remedy="The log above has the engines' own words; `slipstream doctor` checks the machine.",
                )
            )

    def _tell_living(self) -> None:
        self._on_living(sum(each.is_ready for each in self._keepers))

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or error
            self.closed.set()
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _in_thread(self, name: str, work: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - the thread's boundary: `run` raises it
                self._fail(error)

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()


def _stamps(files: TargetFiles) -> list[FileStamp]:
    return [file_stamp(path) for path in (*files.weights, *files.descriptions)]
