"""Command line of the target server: flags become settings; torch is imported only once they are right."""

import argparse
import json
import re
import shutil
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from recipes import find_recipe
from slipstream import __version__
from slipstream.command_parser import CommandParser
from slipstream.engine_devices import engine_groups
from slipstream.entrypoint import run_main
from slipstream.errors import SlipstreamError
from slipstream.flag_values import THREADS, within
from slipstream.listen import ListenAddress, read_token
from slipstream.machine_probe import usable_cores
from slipstream.packaged_model import target_here
from slipstream.run_spec.data_entries import directories_of
from slipstream.run_spec.load import load_recipe
from slipstream.run_spec.overrides import apply_overrides, parse_override
from slipstream.run_spec.problems import problems_of
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import DataSpec, TargetSpec
from slipstream.stand_in import answer_as_typed
from slipstream.telemetry.logs import configure_logging
from target_server import data_command, lineage_command, operator_command
from target_server.engine_plan import EnginePlan

PROGRAM = "target-server"
DEFAULT_SHELF_BYTES = 4 * 2**30
_SECONDS = within(float, 0.001, 1e9, "number of seconds")

_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def main() -> int:
    """The console script."""
    return run_main(PROGRAM, lambda: run_command(sys.argv[1:]))


def run_command(arguments: Sequence[str]) -> int:
    """Parse and serve; returns the exit status.

    Raises:
        SlipstreamError: whatever is refused, and whatever ended the engine.
        SystemExit: usage errors (2) and --help (0).
    """
    args = _parser().parse_args(arguments)
    program = args.name if args.command == "engine" else PROGRAM
    configure_logging(program, level=args.log_level, json=args.log_json)
    if args.command == "engine":
        return _run_engine(args)
    if args.command in data_command.COMMANDS:
        return data_command.run(args)
    if args.command == lineage_command.COMMAND:
        return lineage_command.run(args)
    if args.command in operator_command.COMMANDS:
        return operator_command.run(args)
    target, data = read_target(args.recipe, args.model, args.set)
    listen = ListenAddress.parse(args.listen)
    token = read_token(args.token_file)
    listen.require_token(token)
    _remove_port_file(args.port_file)
    roots = data_roots(args.data_root, data, listen)
    return _serve(args, target, listen, token, roots, data.pack_tokens if data is not None else None)


def read_target(recipe: str | None, model: str | None, overrides: Sequence[str]) -> tuple[TargetSpec, DataSpec | None]:
    """The target to serve, from a recipe or from flags alone; and the recipe's data.

    Raises:
        SlipstreamError: SPEC_INVALID.
    """
    if recipe is not None:
        spec = load_recipe(find_recipe(recipe), overrides).spec
        # Unlike in a recipe, a relative path in a flag starts at the working directory.
        target = spec.target if model is None else spec.target.model_copy(update={"model": model})
        return target, spec.data
    if model is None:
        raise SlipstreamError(
            "There is neither a recipe nor a model to serve.",
            reason=Reason.SPEC_INVALID,
            remedy="Give a recipe, or --model with a directory, a hub name or a .gguf file.",
        )
    table: dict[str, Any] = {"target": {"model": model}}
    apply_overrides(table, [parse_override(override) for override in overrides])
    if len(table) > 1:
        raise SlipstreamError(
            f"Without a recipe only [target] can be overridden, not {', '.join(sorted(table.keys() - {'target'}))}.",
            reason=Reason.SPEC_INVALID,
            remedy="Give the recipe, or leave out the override: trainers bring their own data and training settings.",
        )
    try:
        return TargetSpec.model_validate_json(json.dumps(table["target"]), strict=True), None
    except ValidationError as error:
        problems = [text for _, text in problems_of(error, {}, below=("target",))]
    raise SlipstreamError("; ".join(problems) + ".", reason=Reason.SPEC_INVALID, remedy="Correct the --set flags.")


def data_roots(given: Sequence[Path] | None, data: DataSpec | None, listen: ListenAddress) -> tuple[Path, ...] | None:
    """Directories that trainers may name files in; None allows all.

    Only processes of this machine may name any file. Others are held to --data-root, or else to the recipe's files.
    """
    if given:
        return tuple(given)
    if listen.is_loopback:
        return None
    return tuple(sorted(directories_of(data.files))) if data is not None else ()


def choose_shelf_bytes(given: int | None, shm_dir: Path | None) -> int:
    """The shelf's budget: as given, else 4 GiB, at most half of what is free in shared memory.

    Raises:
        SlipstreamError: ENVIRONMENT_UNSUPPORTED when shared memory does not hold what was given.
    """
    if shm_dir is None:
        return given or DEFAULT_SHELF_BYTES
    usage = shutil.disk_usage(shm_dir)
    if usage.total == 0:  # a tmpfs without a limit
        return given or DEFAULT_SHELF_BYTES
    if given is None:
        return min(DEFAULT_SHELF_BYTES, usage.free // 2)
    if given > usage.free:
        raise SlipstreamError(
            f"--shelf-bytes is {given / 2**20:,.1f} MiB; {shm_dir} has {usage.free / 2**20:,.1f} MiB free of "
            f"{usage.total / 2**20:,.1f} MiB.",
            reason=Reason.ENVIRONMENT_UNSUPPORTED,
            remedy="Make it larger (containers: --shm-size or a tmpfs volume), give a smaller --shelf-bytes, or serve "
            "over gRPC only with --no-shm.",
        )
    return given


def parse_size(text: str) -> int:
    """Bytes, plain or with a unit: `1073741824`, `512MiB`, `1.5 GiB`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(KiB|MiB|GiB|TiB|)", text.strip())
    size = int(float(match.group(1)) * _UNITS[match.group(2)]) if match else 0
    if size <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write bytes, or 512MiB, or 4GiB")
    return size


def _serve(
    args: argparse.Namespace,
    target: TargetSpec,
    listen: ListenAddress,
    token: str | None,
    roots: tuple[Path, ...] | None,
    pack_tokens: int | None,
) -> int:
    import torch

    from slipstream.wire.arena import remove_stale_segments, shared_memory_directory
    from target_server.fixed_payloads import PROBE_BYTES
    from target_server.lease_book import PACKS_AHEAD, Limits
    from target_server.meeting_places import remove_stale_places
    from target_server.server import ServerSettings, TargetServer, leave
    from target_server.state_cache import StateCacheSettings

    engines = plan_engines(args, usable_cores())
    cache = read_state_cache(args.state_cache, args.state_cache_bytes)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    remove_stale_places()
    shm_dir = None if args.no_shm else args.shm_dir or shared_memory_directory()
    if shm_dir is not None:
        remove_stale_segments(shm_dir)  # what a killed server left there is free memory
    elif engines is not None:
        raise SlipstreamError(
            "--devices needs shared memory, in which engine processes hand packs over, and there is no /dev/shm.",
            reason=Reason.ENVIRONMENT_UNSUPPORTED,
            remedy="Name a directory in memory with --shm-dir, or serve from one device with --device.",
        )
    settings = ServerSettings(
        target=target_here(target, sys.stderr.write),
        listen=listen,
        ledger=args.ledger,
        device=_device(args.device, torch.cuda.is_available()),
        shelf_bytes=choose_shelf_bytes(args.shelf_bytes, shm_dir),
        shm_dir=shm_dir,
        data_roots=roots,
        pack_tokens=pack_tokens,
        token=token,
        port_file=args.port_file,
        limits=Limits(
            subscription_timeout=args.subscription_timeout,
            ahead=PACKS_AHEAD * (1 if engines is None else len(engines.devices)),
        ),
        drain_seconds=args.drain_seconds,
        probe_bytes=args.probe_bytes or PROBE_BYTES,
        engines=engines,
        state_cache=StateCacheSettings(*cache) if cache is not None else None,
    )
    server = TargetServer(settings)
    status = server.run()
    return leave(server, status)


def _run_engine(args: argparse.Namespace) -> int:
    from target_server.engine_line import EngineLine
    from target_server.engine_process import run_engine

    return run_engine(EngineLine(socket.socket(fileno=args.control_fd)), args.threads)


def plan_engines(args: argparse.Namespace, cores: int) -> EnginePlan | None:
    """The engine processes that the flags ask for; None: the engine is a thread of the server's.

    Raises:
        SlipstreamError: SPEC_INVALID, ENVIRONMENT_UNSUPPORTED.
    """
    groups = engine_groups(args.devices, args.tensor_parallel)
    if groups is None:
        return None
    if args.no_shm:
        raise SlipstreamError(
            "--devices and --no-shm exclude each other: engine processes hand packs over in shared memory.",
            reason=Reason.SPEC_INVALID,
            remedy="Leave out --no-shm, or serve from one device with --device.",
        )
    # More threads than cores would make engines wait for each other.
    shared = max(1, cores // sum(map(len, groups))) if groups[0][0] == "cpu" else None
    flags = ("--log-level", args.log_level, *(("--log-json",) if args.log_json else ()))
    return EnginePlan(groups, args.threads or shared, flags=flags)


def read_state_cache(directory: Path | None, budget_bytes: int | None) -> tuple[Path, int] | None:
    """Directory and budget of the cache of hidden states; None where none is asked for.

    Raises:
        SlipstreamError: SPEC_INVALID.
    """
    if directory is not None and budget_bytes is not None:
        return directory, budget_bytes
    if directory is None and budget_bytes is None:
        return None
    raise SlipstreamError(
        "A cache of hidden states needs a directory and a budget, and only one of them is given.",
        reason=Reason.SPEC_INVALID,
        remedy="Give both, --state-cache DIR and --state-cache-bytes 200GiB, or neither.",
    )


def _remove_port_file(path: Path | None) -> None:
    """Of an earlier server: nobody may take it for this one's.

    Raises:
        SlipstreamError: ENVIRONMENT_UNSUPPORTED.
    """
    if path is None:
        return
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise SlipstreamError(
            f"The port file {path} cannot be written: {error.strerror}.",
            reason=Reason.ENVIRONMENT_UNSUPPORTED,
            remedy="Name a file in a writable directory with --port-file.",
        ) from error


def _device(requested: Literal["auto", "cpu", "cuda"], cuda_available: bool) -> str:
    if requested == "auto":
        return "cuda" if cuda_available else "cpu"
    return requested


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = CommandParser(
        prog=PROGRAM, description="Computes hidden states of a frozen language model and serves them to trainers."
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    serve = commands.add_parser("serve", help="load a target and serve it")
    serve.add_argument("recipe", nargs="?", metavar="RECIPE", help="whose target is served: a file, or a shipped one")
    serve.add_argument("--model", help="directory, hub name or .gguf file; instead of the recipe's")
    serve.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a recipe's setting")
    serve.add_argument("--listen", default="127.0.0.1:50051", metavar="HOST:PORT", help="default: %(default)s")
    where = serve.add_mutually_exclusive_group()
    where.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="of one engine; default: %(default)s"
    )
    where.add_argument("--devices", metavar="LIST", help="an engine process for each, e.g. cuda:0,cuda:1")
    serve.add_argument(
        "--tensor-parallel", type=within(int, 1, 1000, "number of devices"), default=1, metavar="K",
        help="devices that share the target's layers; --devices names a multiple of K",
    )  # fmt: skip
    serve.add_argument("--threads", type=THREADS, metavar="N", help="CPU threads of an engine's forward")
    serve.add_argument(
        "--shelf-bytes", type=parse_size, metavar="SIZE", help="memory for packs, e.g. 8GiB; default: up to 4GiB"
    )
    serve.add_argument(
        "--ledger", type=Path, default=Path("target-server-ledger.sqlite"), metavar="FILE", help="default: %(default)s"
    )
    serve.add_argument(
        "--data-root",
        type=Path,
        action="append",
        metavar="DIR",
        help="trainers may name files in here only; repeatable",
    )
    memory = serve.add_mutually_exclusive_group()
    memory.add_argument("--shm-dir", type=Path, metavar="DIR", help="shared memory; default: /dev/shm")
    memory.add_argument("--no-shm", action="store_true", help="serve over gRPC only")
    serve.add_argument(
        "--state-cache", type=Path, metavar="DIR", help="keep hidden states on disk, for later epochs and other runs"
    )
    serve.add_argument("--state-cache-bytes", type=parse_size, metavar="SIZE", help="all that it may take, e.g. 200GiB")
    serve.add_argument("--port-file", type=Path, metavar="FILE", help="receives HOST:PORT once the server listens")
    serve.add_argument("--token-file", type=Path, metavar="FILE", help="bearer token; else $SLIPSTREAM_TOKEN")
    _add_rarely_used(serve)
    _add_engine(commands)
    data_command.add_parsers(commands)
    lineage_command.add_parser(commands)
    operator_command.add_parsers(commands)
    answer_as_typed(commands)
    return parser


def _add_rarely_used(serve: argparse.ArgumentParser) -> None:
    serve.add_argument(
        "--subscription-timeout", type=_SECONDS, default=30.0, metavar="SECONDS",
        help="a run that is silent for so long pins no packs; default: %(default)g",
    )  # fmt: skip
    serve.add_argument(
        "--drain-seconds", type=_SECONDS, default=30.0, metavar="SECONDS",
        help="how long SIGTERM waits for leases that are out; default: %(default)g",
    )  # fmt: skip
    serve.add_argument(
        "--probe-bytes", type=parse_size, metavar="SIZE",
        help="payload that trainers measure transports with; default: 64MiB",
    )  # fmt: skip
    serve.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    serve.add_argument("--log-json", action="store_true", help="one JSON object a line")


def _add_engine(commands: Any) -> None:
    """What the server starts its engine processes with."""
    engine = commands.add_parser("engine", description="One engine of a target server, which starts it by itself.")
    engine.add_argument("--control-fd", type=int, required=True)
    engine.add_argument("--name", required=True)
    engine.add_argument("--threads", type=THREADS)
    engine.add_argument("--log-level", default="info")
    engine.add_argument("--log-json", action="store_true")
