"""A target server without its process: a SteppedTarget with gRPC, the engine in a thread, and a clock that goes.

Other than `target-server serve` it can be looked into: slots can be damaged, and tests may put the clock forward.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from slipstream.hidden_states.v1.stream_admin_service_pb2_grpc import add_StreamAdminServiceServicer_to_server
from slipstream.wire.channel import SERVER_OPTIONS
from slipstream.wire.status import StatusInterceptor
from slipstream.wire.transports.grpc import add_hidden_state_service
from target_server.admin_service import StreamAdminService
from target_server.fixed_payloads import FixedPayloadStore
from target_server.readiness import Readiness
from target_server.served_target import ServedTarget, describe_target
from target_server.service import HiddenStateService
from target_server.target_model import TargetModel
from tests.fakes.stepped_target import SteppedTarget

PROBE_BYTES = 2**16
_THREADS = 24


class LiveTarget(SteppedTarget):
    """Serves from its construction to `close`."""

    def __init__(self, target: TargetModel, ledger: Path, *, shm_dir: Path | None, shelf_bytes: int = 2**20) -> None:
        """`shm_dir`: None to serve over gRPC only."""
        super().__init__(target, ledger, shm_dir=shm_dir, shelf_bytes=shelf_bytes)
        fixed = FixedPayloadStore(shm_dir)
        handshake = describe_target(
            target,
            fixed,
            fixed.add("frozen_weights", target.frozen_weights()),
            shm_dir=shm_dir,
            probe_bytes=PROBE_BYTES,
            max_outstanding=self.book.limits.max_outstanding,
        )
        self._served = ServedTarget(target.fingerprint, handshake, self.catalog, self.producer, fixed)
        readiness = Readiness("live")
        readiness.serve(self._served)
        service = HiddenStateService(self.ledger, readiness, max_polls=_THREADS // 2)
        self._grpc = grpc.server(
            ThreadPoolExecutor(_THREADS), interceptors=[StatusInterceptor()], options=SERVER_OPTIONS
        )
        add_hidden_state_service(self._grpc, service, service.read_payload)
        add_StreamAdminServiceServicer_to_server(StreamAdminService(self.control, readiness), self._grpc)
        self.address = f"127.0.0.1:{self._grpc.add_insecure_port('127.0.0.1:0')}"
        self._grpc.start()
        self._engine = threading.Thread(target=self.producer.run, name="engine", daemon=True)
        self._engine.start()

    def clock(self) -> float:
        """Time passes by itself; `now` is how far it was put forward."""
        return time.monotonic() + self.now

    def pass_time(self, seconds: float) -> None:
        """Put the ledger's clock forward, and let all who wait look at it."""
        self.now += seconds
        with self.book.lock:
            self.book.changed()

    def close(self) -> None:
        """End the engine, then everything."""
        self.queue.close()
        self._engine.join(20)
        self._grpc.stop(0).wait(10)
        self._served.close()
        self.store.close()
