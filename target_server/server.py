"""The process: listens at once, loads the model in the engine thread, serves, drains on SIGTERM.

Threads: the main thread waits for the end; the engine thread loads and runs the model, or waits for the processes that
do; gRPC's threads answer.
"""

import logging
import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from slipstream.errors import SlipstreamError
from slipstream.hidden_states.v1 import hidden_state_service_pb2, stream_admin_service_pb2
from slipstream.hidden_states.v1.stream_admin_service_pb2_grpc import add_StreamAdminServiceServicer_to_server
from slipstream.listen import ListenAddress
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import TargetSpec
from slipstream.telemetry.logs import log_event
from slipstream.wire.channel import SERVER_OPTIONS
from slipstream.wire.status import StatusInterceptor
from slipstream.wire.transports.grpc import add_hidden_state_service
from target_server.access import TokenInterceptor
from target_server.admin_service import StreamAdminService
from target_server.engine_plan import EnginePlan
from target_server.engine_serving import EngineHost
from target_server.fixed_payloads import PROBE_BYTES, FixedPayloadStore
from target_server.lease_book import LeaseBook, Limits
from target_server.lease_ledger import LeaseLedger
from target_server.ledger_store import LedgerStore
from target_server.producer import Producer
from target_server.readiness import Readiness
from target_server.served_target import PackMaker, ServedTarget, describe_target
from target_server.service import HiddenStateService
from target_server.state_cache import StateCache, StateCacheSettings, describe_cached
from target_server.state_cache_queue import CachedQueue
from target_server.state_cache_store import StateStore
from target_server.stream_control import StreamControl
from target_server.stream_shelves import StreamShelves
from target_server.streams import StreamCatalog
from target_server.target_model import TargetModel
from target_server.target_view import EngineTarget
from target_server.work_queue import WorkQueue

_WAKE_SECONDS = 0.2
_RPC_THREADS = 64
_POLL_THREADS = 40
"""Of those, so many may wait in LeasePacks; the rest stays free for reads, commits and health."""
_STOP_GRACE_SECONDS = 2.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerSettings:
    """Deployment: never part of what is learned."""

    target: TargetSpec
    listen: ListenAddress
    ledger: Path
    device: str
    """Of the engine in this process; unused where engines are processes."""
    shelf_bytes: int
    shm_dir: Path | None
    """None: gRPC only."""
    data_roots: Sequence[Path] | None
    pack_tokens: int | None = None
    """Of the recipe: what the target gets ready for before it is served. Other lengths come at their first pack."""
    token: str | None = None
    port_file: Path | None = None
    limits: Limits = field(default_factory=Limits)
    drain_seconds: float = 30.0
    """How long an orderly end waits for leases that are out."""
    probe_bytes: int = PROBE_BYTES
    engines: EnginePlan | None = None
    """Engine processes; None: the engine is a thread of this process."""
    state_cache: StateCacheSettings | None = None


class TargetServer:
    """One target server. `run` belongs to the main thread."""

    def __init__(self, settings: ServerSettings) -> None:
        """Open the ledger and listen.

        Raises:
            SlipstreamError: SPEC_INVALID, PORT_IN_USE, ENVIRONMENT_UNSUPPORTED.
        """
        settings.listen.require_token(settings.token)
        self._settings = settings
        self._store = LedgerStore(settings.ledger)
        self._book = LeaseBook(self._store, settings.limits)
        self._ledger = LeaseLedger(self._book)
        self._queue = WorkQueue(self._book)
        self._control = StreamControl(self._book)
        self._readiness = Readiness(settings.target.model)
        self._engines = self._engine_host()
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._served: ServedTarget | None = None
        self._states: StateStore | None = None
        self._cache: StateCache | None = None
        self._engine = threading.Thread(target=self._run_engine, name="engine", daemon=True)
        try:
            if settings.state_cache is not None:
                self._states = StateStore(settings.state_cache.directory, settings.state_cache.budget_bytes)
            self._grpc, self.port = self._listen()
        except BaseException:
            self._store.close()
            if self._states is not None:
                self._states.close()
            raise

    @property
    def address(self) -> ListenAddress:
        """Where it listens, with the real port."""
        return ListenAddress(self._settings.listen.host, self.port)

    @property
    def engine_is_busy(self) -> bool:
        """True when the engine thread could not be joined: it still loads, or sits in a forward."""
        return self._engine.is_alive()

    def run(self) -> int:
        """Serve until SIGTERM, SIGINT or a failure of the engine; returns 0 after an orderly end.

        Raises:
            SlipstreamError: whatever ended the engine; the process must end with it.
        """
        previous = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            self._grpc.start()
            _write_port_file(self._settings.port_file, self.address)
            self._engine.start()
            # Python runs a signal's handler in this thread, and not before it wakes up; a kernel may let another thread
            # take the signal.
            while not self._ended.wait(_WAKE_SECONDS):
                pass
            if self._failure is None:
                self._drain()
            # Now: a forward that outlasts `_close` fails for want of the memory it writes to, and that is no failure.
            failure = self._failure
        finally:
            self._close()
            for number, handler in previous.items():
                signal.signal(number, handler)
        if failure is not None:
            raise failure
        return 0

    def _engine_host(self) -> EngineHost | None:
        settings = self._settings
        if settings.engines is None:
            return None
        assert settings.shm_dir is not None, "engine processes write into shared memory"
        return EngineHost(settings.engines, settings.shm_dir, lambda living: self._readiness.set_working(living > 0))

    def _listen(self) -> tuple[grpc.Server, int]:
        status = StatusInterceptor()
        token = self._settings.token
        server = grpc.server(
            ThreadPoolExecutor(_RPC_THREADS, thread_name_prefix="rpc"),
            interceptors=(status, TokenInterceptor(token)) if token else (status,),
            options=SERVER_OPTIONS,
        )
        service = HiddenStateService(self._ledger, self._readiness, _POLL_THREADS)
        add_hidden_state_service(server, service, service.read_payload)
        add_StreamAdminServiceServicer_to_server(StreamAdminService(self._control, self._readiness), server)
        health_pb2_grpc.add_HealthServicer_to_server(self._readiness.health, server)
        names = [
            hidden_state_service_pb2.DESCRIPTOR.services_by_name["HiddenStateService"].full_name,
            stream_admin_service_pb2.DESCRIPTOR.services_by_name["StreamAdminService"].full_name,
            "grpc.health.v1.Health",
            reflection.SERVICE_NAME,
        ]
        reflection.enable_server_reflection(names, server)
        return server, _bind(server, self._settings.listen)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Begin the orderly end. The same signal once more has its usual effect: it ends the process at once."""
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)
        self._ended.set()

    def _run_engine(self) -> None:
        """The engine thread: everything that touches the model."""
        try:
            self._served = self._load()
            self._readiness.serve(self._served)
            log_event(
                _log, "info", "serving", address=str(self.address), model=self._served.handshake.model_id,
                fingerprint=self._served.fingerprint[:16], layers=self._served.handshake.num_layers,
                shelf_mib=self._settings.shelf_bytes // 2**20, shared_memory=self._settings.shm_dir,
            )  # fmt: skip
            self._served.producer.run()
        except BaseException as error:  # noqa: BLE001 - the thread's boundary: `run` raises it
            self._failure = error
            self._readiness.drain()
            self._ended.set()

    def _load(self) -> ServedTarget:
        settings = self._settings
        where = settings.engines.in_words() if settings.engines is not None else settings.device
        log_event(_log, "info", "loading_target", model=settings.target.model, device=where)
        fixed = FixedPayloadStore(settings.shm_dir)
        target: TargetModel | EngineTarget
        if self._engines is None:
            target = TargetModel.load(settings.target, device=settings.device)
            if settings.pack_tokens is not None:
                target.prepare(settings.pack_tokens)
            frozen_weights = fixed.add("frozen_weights", target.frozen_weights())
        else:
            target = self._engines.load(settings.target, settings.pack_tokens)
            frozen_weights = self._engines.add_frozen_weights(fixed)
        handshake = describe_target(
            target,
            fixed,
            frozen_weights,
            shm_dir=settings.shm_dir,
            probe_bytes=settings.probe_bytes,
            max_outstanding=settings.limits.max_outstanding,
        )
        catalog = StreamCatalog(
            target,
            StreamShelves(self._book),
            shelf_bytes=settings.shelf_bytes,
            shm_dir=settings.shm_dir,
            data_roots=settings.data_roots,
            on_drop=self._engines.forget if self._engines is not None else None,
        )
        if settings.pack_tokens is not None:
            catalog.check_room(settings.pack_tokens)
        return ServedTarget(target.fingerprint, handshake, catalog, self._make_packs(target, catalog), fixed)

    def _make_packs(self, target: TargetModel | EngineTarget, catalog: StreamCatalog) -> PackMaker:
        queue: WorkQueue | CachedQueue = self._queue
        if self._states is not None:
            self._cache = StateCache(self._states, describe_cached(target), self._settings.pack_tokens)
            queue = CachedQueue(self._queue, catalog, self._cache)
        maker: PackMaker
        if isinstance(target, TargetModel):
            maker = Producer(target, queue, catalog)
        else:
            assert self._engines is not None
            maker = self._engines.serve(queue, catalog)
        if isinstance(queue, CachedQueue):
            queue.throughput = maker.throughput
        return maker

    def _drain(self) -> None:
        self._readiness.drain()
        self._control.drain()
        # Said when it is true: whoever reads the line finds health NOT_SERVING.
        log_event(_log, "info", "draining", seconds=self._settings.drain_seconds)
        finished = self._control.wait_until_drained(self._settings.drain_seconds)
        log_event(_log, "info", "drained", leases_left=not finished)

    def _close(self) -> None:
        self._queue.close()
        self._grpc.stop(_STOP_GRACE_SECONDS).wait()
        if self._engines is not None:
            self._engines.close()
        # A model that is still being loaded cannot be interrupted; a forward ends soon.
        if self._engine.ident is not None:
            self._engine.join(timeout=_STOP_GRACE_SECONDS)
        if self._cache is not None:
            self._cache.close()
        elif self._states is not None:
            self._states.close()
        if self._served is not None:
            self._served.close()
        self._store.close()


def leave(server: TargetServer, status: int) -> int:
    """The exit status; where a model is still being loaded, leave at once: that thread cannot be joined."""
    if server.engine_is_busy:
        logging.shutdown()
        os._exit(status)
    return status


def _bind(server: grpc.Server, listen: ListenAddress) -> int:
    listen.bind().close()  # says in words what is wrong with the address; gRPC would only say that it failed
    try:
        port: int = server.add_insecure_port(str(listen))
    except RuntimeError as error:
        raise listen.in_use() from error
    if port == 0:
        raise listen.in_use()
    return port


def _write_port_file(path: Path | None, address: ListenAddress) -> None:
    """Write it under another name first: whoever sees the file sees all of it.

    Raises:
        SlipstreamError: ENVIRONMENT_UNSUPPORTED.
    """
    if path is None:
        return
    draft = path.with_name(f".{path.name}.draft")
    try:
        draft.write_text(f"{address}\n", encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise SlipstreamError(
            f"The port file {path} cannot be written: {error.strerror}.",
            reason=Reason.ENVIRONMENT_UNSUPPORTED,
            remedy="Name a file in a writable directory with --port-file.",
        ) from error
