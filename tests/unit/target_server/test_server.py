"""The end of the process: what counts as a failure of the engine, and what does not."""

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.listen import ListenAddress
from slipstream.run_spec.spec import TargetSpec
from target_server.server import ServerSettings, TargetServer


@pytest.fixture
def settings(tmp_path: Path) -> ServerSettings:
    return ServerSettings(
        target=TargetSpec(model="none"),
        listen=ListenAddress("127.0.0.1", 0),
        ledger=tmp_path / "ledger.sqlite",
        device="cpu",
        shelf_bytes=2**20,
        shm_dir=None,
        data_roots=None,
    )


def failing_after(event: threading.Event) -> Callable[[], None]:
    def load() -> None:
        assert event.wait(20)
        raise RuntimeError("the slot's memory is gone")

    return load


def test_a_forward_that_fails_during_the_end_is_no_failure(
    settings: ServerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = TargetServer(settings)
    closing = threading.Event()
    close = server._queue.close

    def close_queue() -> None:
        close()
        closing.set()

    monkeypatch.setattr(server, "_load", failing_after(closing))
    monkeypatch.setattr(server._queue, "close", close_queue)
    server._ended.set()
    assert server.run() == 0
    assert isinstance(server._failure, RuntimeError), "it did fail, too late to matter"


def test_a_signal_that_another_thread_takes_ends_it(settings: ServerSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some kernels give a process's signal to any thread; the main thread sleeps on."""
    server = TargetServer(settings)
    over = threading.Event()

    def load() -> None:
        time.sleep(0.5)  # until the main thread sleeps
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        assert over.wait(20)
        raise RuntimeError("nothing more to do")

    close = server._queue.close

    def close_queue() -> None:
        close()
        over.set()

    monkeypatch.setattr(server, "_load", load)
    monkeypatch.setattr(server._queue, "close", close_queue)
    assert server.run() == 0


def test_a_failure_of_the_engine_ends_the_process(settings: ServerSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    server = TargetServer(settings)
    now = threading.Event()
    now.set()
    monkeypatch.setattr(server, "_load", failing_after(now))
    with pytest.raises(RuntimeError, match="memory is gone"):
        server.run()
