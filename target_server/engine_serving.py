"""A target that engine processes have, made ready to be served: what the server reads itself, and what engines tell it.

The server hashes the target's files, which also brings them into memory for the engines, and loads the tokenizer.
Sizes, limits and the frozen weights come from the engine that is ready first. No weights are loaded here.
"""

import threading
from collections.abc import Callable
from pathlib import Path

import torch

from slipstream.engine_devices import check_present
from slipstream.errors import SlipstreamError
from slipstream.hidden_states.v1 import hidden_state_service_pb2 as pb
from slipstream.quantised_target import find_quantisation
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import TargetSpec
from slipstream.target_files import locate_target
from slipstream.target_fingerprint import fingerprint_target
from slipstream.target_loading import load_tokenizer
from slipstream.tensor_parallel import check_divisible
from slipstream.wire.arena import PayloadArena
from target_server.engine_plan import EnginePlan
from target_server.engine_pool import EnginePool, EngineTerms
from target_server.fixed_payloads import FixedPayloadStore
from target_server.producer import Assignments
from target_server.streams import StreamCatalog
from target_server.target_view import EngineTarget


class EngineHost:
    """The engines of a server, from before they are started until they have left. Thread-safe."""

    def __init__(self, plan: EnginePlan, shm_dir: Path, on_living: Callable[[int], None]) -> None:
        """`on_living`: as EnginePool."""
        self._plan = plan
        self._shm_dir = shm_dir
        self._on_living = on_living
        self._lock = threading.Lock()
        self._pool: EnginePool | None = None
        self._closed = False

    def load(self, spec: TargetSpec, pack_tokens: int | None) -> EngineTarget:
        """Start the engines and wait for the first.

        Raises:
            SlipstreamError: MODEL_INVALID, ENVIRONMENT_UNSUPPORTED, SPEC_INVALID, OUT_OF_MEMORY: what an engine cannot
                do; INTERNAL when all of them die again and again.
        """
        devices = [device for engine in self._plan.devices for device in engine]
        check_present(devices, torch.cuda.device_count() if devices[0] != "cpu" else 0)
        files = locate_target(spec)
        find_quantisation(spec, files)  # refuses before the files are hashed, which takes minutes for large ones
        if self._plan.ranks > 1:
            check_divisible(spec, files, self._plan.ranks)
        tokenizer = load_tokenizer(spec)
        fingerprint = fingerprint_target(files, spec.dtype)
        terms = EngineTerms(spec, files, fingerprint, self._shm_dir, pack_tokens)
        pool = EnginePool(self._plan, terms, self._on_living)
        with self._lock:
            self._pool = pool
            if self._closed:
                raise SlipstreamError("The server was ended while it loaded.", reason=Reason.TARGET_DRAINING)
        pool.start()
        return EngineTarget.from_facts(pool.wait_ready(), fingerprint, tokenizer)

    def add_frozen_weights(self, fixed: FixedPayloadStore) -> pb.FixedPayload:
        """As EnginePool; after `load`."""
        return self._loaded().add_frozen_weights(fixed)

    def serve(self, queue: Assignments, catalog: StreamCatalog) -> EnginePool:
        """Begin to compute what the queue asks for; after `load`."""
        pool = self._loaded()
        pool.serve(queue, catalog)
        return pool

    def forget(self, arena: PayloadArena) -> None:
        """As EnginePool; after `load`."""
        self._loaded().forget(arena)

    def close(self) -> None:
        """Every engine leaves; waits until they have. Idempotent."""
        with self._lock:
            self._closed = True
            pool = self._pool
        if pool is not None:
            pool.close()

    def _loaded(self) -> EnginePool:
        assert self._pool is not None, "the engines are not loaded"
        return self._pool
