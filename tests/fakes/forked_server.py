"""A real target server in a process of its own, forked from one that has imported torch: a tenth of a second each."""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from slipstream.listen import ListenAddress
from slipstream.run_spec.spec import TargetSpec

_START_SECONDS = 120.0
_END_SECONDS = 10.0


@contextmanager
def forked_target_server(target: TargetSpec, ledger: Path) -> Iterator[str]:
    """Its address while the context lasts; payloads go over gRPC."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "target_server.server", "transformers.models.auto.modeling_auto"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(target, ledger, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(_START_SECONDS), "the target server does not listen"
        yield ours.recv()
    finally:
        process.terminate()
        process.join(_END_SECONDS)
        if process.is_alive():
            process.kill()
            process.join()


def _serve(target: TargetSpec, ledger: Path, told: Connection) -> None:
    import torch

    from target_server.server import ServerSettings, TargetServer

    torch.set_num_threads(1)
    settings = ServerSettings(
        target=target,
        listen=ListenAddress("127.0.0.1", 0),
        ledger=ledger,
        device="cpu",
        shelf_bytes=1 << 26,
        shm_dir=None,
        data_roots=None,
        drain_seconds=0.1,
        probe_bytes=1 << 16,
    )
    server = TargetServer(settings)
    told.send(str(server.address))
    server.run()
