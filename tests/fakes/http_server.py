"""An ASGI application behind a real socket, in a thread of the test."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """The address `http://127.0.0.1:PORT` of the application, lifespan included, until the block is left."""
    started = threading.Event()

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            started.set()

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            app.state.services.feed.close()
            await super().shutdown(sockets)

    config = uvicorn.Config(app, log_config=None, log_level="error", access_log=False, timeout_graceful_shutdown=5)
    server = Server(config)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, name="http-server", daemon=True)
        thread.start()
        assert started.wait(60), "the server did not start"
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive(), "the server did not stop"
