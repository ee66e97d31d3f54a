"""`slipstream up`: control API, target server and trainers of this machine as processes that are kept alive."""

import argparse
from pathlib import Path

from slipstream.flag_values import within

_DESCRIPTION = """
Brings up what the home's stack.json says: after everything was killed, `slipstream up` goes on where it was, runs
included. A RECIPE, --model or --set makes a new stack; in a home without one, the demo's model is served.
"""
_EPILOG = """
exit status: 0 stopped in order, ready (--detach), or already up; 2 a recipe or flag; 3 a model or path; 4 a device or
port; 18 a stack with other settings is up in this home; 19 a process keeps dying; 130 interrupted while waiting
(--detach).
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "up", help="bring up a local stack and keep it up", description=_DESCRIPTION, epilog=_EPILOG
    )
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="whose target is served: a file, or a shipped one")
    parser.add_argument("--model", help="directory, hub name or .gguf file; instead of the recipe's")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a recipe's setting")
    parser.add_argument("--home", type=Path, metavar="DIR", help="default: $SLIPSTREAM_HOME, else ~/.slipstream")
    parser.add_argument("--listen", metavar="HOST:PORT", help="of the control API; default: 127.0.0.1:8080")
    parser.add_argument("--target-listen", metavar="HOST:PORT", help="default: 127.0.0.1:50051")
    parser.add_argument(
        "--trainers",
        type=within(int, 0, 1000, "number of trainers"),
        metavar="N",
        help="default: one for each GPU beside the target's",
    )
    parser.add_argument(
        "--devices", metavar="LIST", help="the target's: cpu, cuda:N, or an engine on each of cuda:0,cuda:1; default: "
        "the first GPU"
    )  # fmt: skip
    # As it was called once.
    parser.add_argument("--target-device", dest="devices", help=argparse.SUPPRESS)
    parser.add_argument(
        "--tensor-parallel",
        type=within(int, 1, 1000, "number of devices"),
        metavar="K",
        help="of --devices that share the target's layers; default: 1",
    )
    parser.add_argument("--trainer-devices", type=_devices, default=(), metavar="DEVICE,…", help="one trainer on each")
    parser.add_argument("--no-target", action="store_true", help="no target server: register others' by REST")
    parser.add_argument(
        "--data-root", type=Path, action="append", default=[], metavar="DIR",
        help="runs may name files in here, beside the recipe's and the working directory, only; repeatable. "
        "Default: any file, while only this machine can ask",
    )  # fmt: skip
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="bearer token; default: $SLIPSTREAM_TOKEN")
    parser.add_argument("-d", "--detach", action="store_true", help="return once everything is ready")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="default: text")


def _devices(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def run(args: argparse.Namespace) -> int:
    """Bring the stack up; in the foreground, stay until Ctrl-C or `slipstream down`.

    Raises:
        SlipstreamError: whatever keeps it from coming up; see the exit statuses above.
    """
    # Imported late: not for `--help`.
    from slipstream.cli.bring_up import bring_up

    return bring_up(args)
