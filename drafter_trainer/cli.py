"""`drafter-trainer run`, `eval`, `export`, `import`, `doctor` and `worker`. torch is imported only once the arguments
are understood, and never by a worker."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from drafter_trainer.agent import command as agent
from drafter_trainer.agent_line import AgentLine
from drafter_trainer.evaluation import command as evaluation
from drafter_trainer.formats import command as formats
from recipes import find_recipe
from slipstream import __version__
from slipstream.command_parser import CommandParser
from slipstream.entrypoint import run_main
from slipstream.flag_values import THREADS, within
from slipstream.listen import read_token
from slipstream.run_spec.load import describe, load_recipe
from slipstream.stand_in import answer_as_typed
from slipstream.telemetry.logs import configure_logging

PROGRAM = "drafter-trainer"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    return run_main(PROGRAM, lambda: _dispatch(build_parser().parse_args(arguments)))


def _directory(text: str) -> Path:
    """An empty name would be this directory: what a variable that is not set leaves in a script."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty; name a directory, or leave it out")
    return Path(text)


def build_parser() -> argparse.ArgumentParser:
    """All flags of the program."""
    parser: argparse.ArgumentParser = CommandParser(
        prog=PROGRAM, description="Trains drafters, and measures them by decoding."
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="train a drafter; goes on where an earlier start of the run was left")
    run.add_argument("recipe", metavar="RECIPE", help="a .toml file, the name of one that ships, or a run's spec.json")
    run.add_argument("--target", metavar="HOST:PORT", help="address of the target server")
    run.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="change a setting; repeatable"
    )
    run.add_argument("--run-dir", type=_directory, metavar="DIR", help="where the run lives; default: runs/NAME")
    run.add_argument("--threads", type=THREADS, metavar="N", help="CPU threads of torch; default: torch's own choice")
    run.add_argument(
        "--resume",
        choices=("auto", "never"),
        default="auto",
        help="auto (default): go on from the newest checkpoint in the run directory; never: refuse a used directory",
    )
    run.add_argument(
        "--log-every",
        type=within(float, 0, 1e9, "number of seconds"),
        default=10.0,
        metavar="SECONDS",
        help="between progress lines; default: 10",
    )
    run.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    run.add_argument(
        "--token-file", type=Path, metavar="FILE", help="the target's bearer token; else $SLIPSTREAM_TOKEN"
    )
    run.add_argument("--dry-run", action="store_true", help="print the resolved run definition and leave")
    run.add_argument("--agent-fd", type=int, help=argparse.SUPPRESS)  # the line to the agent that starts this process
    evaluation.add_arguments(commands.add_parser("eval", help="decode prompts with a trained drafter"))
    formats.add_export_arguments(commands.add_parser("export", help="write a drafter as vLLM, SGLang or z-lab read it"))
    formats.add_import_arguments(commands.add_parser("import", help="read and test a drafter of one of these formats"))
    doctor = commands.add_parser(
        "doctor", help="examine compiled attention on the first GPU; slipstream doctor says more"
    )
    doctor.add_argument("--json", action="store_true", help="one JSON object, for programs")
    agent.add_arguments(commands.add_parser("worker", help="wait for runs of a control API and train them"))
    answer_as_typed(commands)
    return parser


def _dispatch(arguments: argparse.Namespace) -> int:
    if arguments.command == "eval":
        configure_logging(PROGRAM)
        return evaluation.run(arguments)
    if arguments.command in ("export", "import"):
        configure_logging(PROGRAM)
        return (formats.run_export if arguments.command == "export" else formats.run_import)(arguments)
    if arguments.command == "doctor":
        from drafter_trainer.doctor import print_examination

        return print_examination(as_json=arguments.json)
    if arguments.command == "worker":
        configure_logging(PROGRAM, level=arguments.log_level)
        return agent.run(arguments)
    line = AgentLine(arguments.agent_fd)
    with line.failures_told():
        return _run(arguments, line)


def _run(arguments: argparse.Namespace, line: AgentLine) -> int:
    loaded = load_recipe(find_recipe(arguments.recipe), arguments.overrides)
    if arguments.dry_run:
        sys.stdout.write(describe(loaded))
        return 0
    if arguments.target is None:
        build_parser().error("run needs --target HOST:PORT")
    configure_logging(PROGRAM, level=arguments.log_level)
    if arguments.threads is not None:
        # Before torch is imported: its thread pools are sized when they are loaded.
        os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    from drafter_trainer.start import RunOptions, train

    options = RunOptions(
        target=arguments.target,
        run_directory=arguments.run_dir or Path("runs") / loaded.spec.name,
        resume=arguments.resume == "auto",
        log_every=arguments.log_every,
        threads=arguments.threads,
        token=read_token(arguments.token_file),
        agent=line,
    )
    return train(loaded.spec, options)
