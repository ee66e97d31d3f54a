"""Command line of the control API: `control-api --listen 127.0.0.1:8080`."""

import argparse
import logging
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from control_api.settings import Settings
from slipstream import __version__
from slipstream.command_parser import CommandParser
from slipstream.entrypoint import run_main
from slipstream.flag_values import within
from slipstream.listen import ListenAddress, read_token
from slipstream.telemetry.logs import configure_logging, log_event

_LEAVE_SECONDS = 5
_SECONDS = within(float, 0.001, 1e9, "number of seconds")

_LOGGER = logging.getLogger(__name__)


def main() -> int:
    """Entry point of the console script."""
    return run_main("control-api", lambda: serve(sys.argv[1:]))


def serve(arguments: Sequence[str]) -> int:
    """Serve until SIGINT or SIGTERM.

    Raises:
        SlipstreamError: the address is unusable, or open to other machines without a token; a target that is named, or
            the database, is unusable.
    """
    options = _parser().parse_args(arguments)
    token = read_token(options.token_file)
    address = ListenAddress.parse(options.listen)
    address.require_token(token)
    # Imported late: `control-api --help` need not wait for gRPC and the framework.
    from control_api.named_targets import parse_targets

    settings = Settings(
        token=token,
        targets=parse_targets(options.target),
        data_roots=tuple(root.absolute() for root in options.data_root),
        export_root=options.export_root and options.export_root.absolute(),
        heartbeat_seconds=options.heartbeat_seconds,
        trainer_timeout=options.trainer_timeout,
        grace_seconds=options.grace_seconds,
    )
    configure_logging("control-api", level=options.log_level)
    with address.bind() as bound:
        _serve(bound, options.database, settings)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="control-api", description="REST control plane of Slipstream.")
    parser.add_argument("--listen", default="127.0.0.1:8080", metavar="HOST:PORT", help="default: %(default)s")
    parser.add_argument("--database", default="sqlite:///slipstream.sqlite", metavar="URL", help="default: %(default)s")
    parser.add_argument(
        "--target",
        action="append",
        default=[],
        metavar="NAME=ADDRESS",
        help="a target server to register, or to give its new address; repeatable; default: the variable "
        "SLIPSTREAM_TARGETS (NAME=ADDRESS,…)",
    )
    parser.add_argument(
        "--data-root",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="runs may name files in here only, relative ones start at the first; repeatable",
    )
    parser.add_argument(
        "--export-root", type=Path, metavar="DIR", help="put exported checkpoints in here; default: none can be made"
    )
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="bearer token; default: the variable SLIPSTREAM_TOKEN"
    )
    parser.add_argument(
        "--heartbeat-seconds", type=_SECONDS, default=2.0, metavar="SECONDS",
        help="between two heartbeats of a trainer, after which it knows what is wanted; default: %(default)g",
    )  # fmt: skip
    parser.add_argument(
        "--trainer-timeout", type=_SECONDS, default=15.0, metavar="SECONDS",
        help="a trainer that is silent for so long is lost; default: %(default)g",
    )  # fmt: skip
    parser.add_argument(
        "--grace-seconds", type=_SECONDS, default=300.0, metavar="SECONDS",
        help="a run whose trainer is lost fails after so long; default: %(default)g",
    )  # fmt: skip
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    return parser


def _serve(bound: socket.socket, url: str, settings: Settings) -> None:
    import uvicorn

    from control_api.app import create_app
    from control_api.named_targets import register_targets
    from control_api.store.database import Database

    database = Database(url)
    try:
        register_targets(database, settings.targets, now=time.time())
        app = create_app(database, settings)
        config = uvicorn.Config(
            app, log_config=None, log_level="warning", access_log=False, timeout_graceful_shutdown=_LEAVE_SECONDS
        )

        class Server(uvicorn.Server):
            async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
                # Open event streams would keep the server waiting: end them first.
                app.state.services.feed.close()
                await super().shutdown(sockets)

        server = Server(config)
        # The server takes the signal first and sends it again when it has left: status 0, and the database is closed.
        signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(0))
        bound.listen()
        host, port = bound.getsockname()[:2]
        log_event(
            _LOGGER,
            logging.INFO,
            "listening",
            address=str(ListenAddress(host, port)),
            token_required=bool(settings.token),
            database=str(database.path),
        )
        server.run(sockets=[bound])
    finally:
        database.close()


if __name__ == "__main__":
    sys.exit(main())
