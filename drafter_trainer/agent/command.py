"""`drafter-trainer worker`: the agent's flags, and what it is made of."""

import argparse
import os
from pathlib import Path

from drafter_trainer.agent.child import ChildSlot
from drafter_trainer.agent.devices import find_device
from drafter_trainer.agent.identity import Identity, check_name, default_name, open_state, storage_id
from drafter_trainer.agent.loop import Agent
from drafter_trainer.agent.work import Workplace
from slipstream.control_client import DEFAULT_ADDRESS, ControlClient
from slipstream.flag_values import THREADS
from slipstream.listen import read_token


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument(
        "--api", metavar="URL", help=f"address of the control API; else $SLIPSTREAM_API, else {DEFAULT_ADDRESS}"
    )
    parser.add_argument("--name", help="of this trainer; default: the host's name (and the GPU's number, if given)")
    parser.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="where runs live; default: runs")
    parser.add_argument(
        "--state", type=Path, metavar="DIR", help="what makes it the same trainer; default: .slipstream-trainer/NAME"
    )
    parser.add_argument(
        "--device", default="auto", help="auto (default: the first GPU, else the CPU), cpu, cuda or cuda:N"
    )
    parser.add_argument("--threads", type=THREADS, metavar="N", help="CPU threads of a run; default: torch's choice")
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="bearer token of API and targets; else $SLIPSTREAM_TOKEN"
    )
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")


def run(arguments: argparse.Namespace) -> int:
    """Work until told to leave.

    Raises:
        SlipstreamError: the agent cannot be what it is asked to be, or the control API refuses it.
    """
    name = check_name(arguments.name or default_name(arguments.device))
    token = read_token(arguments.token_file)
    device = find_device(arguments.device)
    runs = arguments.runs.absolute()
    state = open_state((arguments.state or Path(".slipstream-trainer") / name).absolute())
    environment = device.environment()
    if arguments.token_file is not None:
        # A file's name, not the secret: the environment of a process shows in listings.
        environment |= {"SLIPSTREAM_TOKEN": "", "SLIPSTREAM_TOKEN_FILE": str(arguments.token_file.absolute())}
    place = Workplace(runs, ChildSlot(state.directory, environment), device, arguments.threads)
    identity = Identity(name, state.instance_id, storage_id(runs))
    with state.lock, ControlClient(arguments.api or os.environ.get("SLIPSTREAM_API") or DEFAULT_ADDRESS, token) as api:
        Agent(api, identity, place).run()
    return 0
