"""Command line of the control API: `control-api --listen 127.0.0.1:8080`."""

import argparse
import logging
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from slipstream import __version__
from slipstream.entrypoint import run_main
from slipstream.listen import ListenAddress, read_token
from slipstream.telemetry.logs import configure_logging, log_event

_LOGGER = logging.getLogger(__name__)


def main() -> int:
    """Entry point of the console script."""
    return run_main("control-api", lambda: serve(sys.argv[1:]))


def serve(arguments: Sequence[str]) -> int:
    """Serve until SIGINT or SIGTERM.

    Raises:
        SlipstreamError: the address is unusable, or open to other machines without a token.
    """
    options = _parser().parse_args(arguments)
    token = read_token(options.token_file)
    address = ListenAddress.parse(options.listen)
    address.require_token(token)
    configure_logging("control-api", level=options.log_level)
    with address.bind() as bound:
        _serve(bound, token)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="control-api", description="REST control plane of Slipstream.")
    parser.add_argument("--listen", default="127.0.0.1:8080", metavar="HOST:PORT", help="default: %(default)s")
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="bearer token; default: the variable SLIPSTREAM_TOKEN"
    )
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    return parser


def _serve(bound: socket.socket, token: str | None) -> None:
    # Imported late: `control-api --help` need not wait for the framework.
    import uvicorn

    from control_api.app import create_app

    bound.listen()
    host, port = bound.getsockname()[:2]
    log_event(_LOGGER, logging.INFO, "listening", address=str(ListenAddress(host, port)), token_required=bool(token))
    config = uvicorn.Config(create_app(token), log_config=None, log_level="warning", access_log=False)
    uvicorn.Server(config).run(sockets=[bound])


if __name__ == "__main__":
    sys.exit(main())
