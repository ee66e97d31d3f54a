"""`slipstream trainer …`: start, stop and forget trainer agents, list them, give them runs and take them off."""

import argparse
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.cli.api_access import add_api_flags, control_api, find_api, say_next
from slipstream.cli.display import ABSENT, Column, age, print_json, print_line, print_table
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason

_COLUMNS = (
    Column("NAME", may_wrap=True),
    Column("STATUS"),
    Column("RUN"),
    Column("DEVICES", rank=1),
    Column("HOST", rank=3),
    Column("HEARD OF", is_number=True, rank=2),
    Column("VERSION", rank=4),
)


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command."""
    parser = subparsers.add_parser("trainer", help="trainers: start, stop, list, attach to a run, detach, remove")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    start = actions.add_parser(
        "start",
        help="start a trainer agent on this machine",
        description="Adds an agent to the local stack where one is up; else runs one here until Ctrl-C.",
    )
    start.add_argument("--name", metavar="NAME", help="default: after the device or the host")
    start.add_argument("--device", default="auto", metavar="DEVICE", help="auto (default), cpu, cuda or cuda:N")
    start.add_argument("--foreground", action="store_true", help="run it here, also where a local stack is up")
    start.add_argument(
        "--runs", type=Path, metavar="DIR", help="where an agent in the foreground keeps runs; default: runs"
    )
    start.add_argument(
        "--state", type=Path, metavar="DIR", help="what makes that agent the same trainer when it comes back"
    )
    stop = actions.add_parser("stop", help="take a trainer out of the local stack; its run is saved and waits")
    stop.add_argument("trainer", metavar="TRAINER", help="its name")
    actions.add_parser("ls", help="list the trainers")
    attach = actions.add_parser("attach", help="give a free trainer a run")
    attach.add_argument("trainer", metavar="TRAINER", help="its name")
    attach.add_argument("run", metavar="RUN", help="a run that no trainer works on")
    detach = actions.add_parser("detach", help="ask a trainer to save and leave its run, which waits for another")
    detach.add_argument("trainer", metavar="TRAINER", help="its name")
    remove = actions.add_parser("remove", help="forget a trainer that is STOPPED or LOST; it may come back")
    remove.add_argument("trainer", metavar="TRAINER", help="its name")
    for action in actions.choices.values():
        add_api_flags(action)


def run(args: argparse.Namespace) -> int:
    """Do what was asked.

    Raises:
        SlipstreamError: whatever the control API or the local stack refuses.
    """
    return HANDLERS[args.action](args)


def _list(args: argparse.Namespace) -> int:
    with control_api(args) as client:
        trainers = list(client.listing("/v1/trainers"))
    if args.output == "json":
        print_json({"trainers": trainers})
        return 0
    if trainers:
        print_table(_COLUMNS, [_row(trainer) for trainer in trainers])
        say_next(args, "run ls")
    else:
        print("no trainers")
        say_next(args, "trainer start")
    return 0


def _row(trainer: Mapping[str, Any]) -> tuple[str, ...]:
    devices = (f"cuda:{one['index']}" if one["kind"] == "cuda" else one["kind"] for one in trainer["devices"])
    return (
        trainer["name"],
        trainer["status"],
        trainer["run"] or ABSENT,
        ", ".join(devices),
        trainer["host"],
        f"{age(trainer['last_seen_at'])} ago",
        trainer["versions"].get("slipstream", ABSENT),
    )


def _attach(args: argparse.Namespace) -> int:
    from slipstream.control_client import segment

    with control_api(args) as client:
        trainer = client.post(f"/v1/trainers/{segment(args.trainer)}:attach", {"run": args.run})
    _say(args, trainer, f"{trainer['name']} works on {trainer['run']}", f"run watch {shlex.quote(args.run)}")
    return 0


def _detach(args: argparse.Namespace) -> int:
    from slipstream.control_client import segment

    with control_api(args) as client:
        trainer = client.post(f"/v1/trainers/{segment(args.trainer)}:detach")
    words = f"{trainer['name']} saves {trainer['run']} and leaves it; that run waits for another trainer"
    _say(args, trainer, words, "trainer ls", f"trainer attach TRAINER {shlex.quote(trainer['run'])}")
    return 0


def _say(args: argparse.Namespace, trainer: Mapping[str, Any], words: str, *commands: str) -> None:
    if args.output == "json":
        print_json(trainer)
        return
    print_line(words)
    say_next(args, *commands)


def _start(args: argparse.Namespace) -> int:
    from slipstream.launcher.home import home_directory

    home = home_directory(args.home)
    if args.foreground or not _is_api_of_stack(args, home):
        return _become_agent(args)
    if args.runs or args.state:
        raise SlipstreamError(
            f"--runs and --state are for an agent in the foreground; the stack keeps both in {home}",
            reason=Reason.SPEC_INVALID,
            remedy="Add --foreground, or leave them out.",
        )
    from slipstream.launcher.stack import add_trainer

    device = args.device
    if device == "auto":
        device = _unused_device(home)
    else:
        _require_present(device)
    name = add_trainer(home, device, name=args.name)
    _say(args, {"name": name, "home": str(home)}, f"{name} joins the stack in {home}", "trainer ls")
    return 0


def _stop(args: argparse.Namespace) -> int:
    from slipstream.launcher.home import home_directory
    from slipstream.launcher.stack import remove_trainer

    home = home_directory(args.home)
    try:
        remove_trainer(home, args.trainer)
    except SlipstreamError as error:
        if error.reason is not Reason.NOT_READY:
            raise
        # Bringing a stack up would stop no trainer.
        remedy = "A trainer that was started by hand leaves with Ctrl-C or SIGTERM; name another stack with --home."
        raise SlipstreamError(error.message, reason=error.reason, remedy=remedy) from error
    words = f"{args.trainer} saves and leaves the stack; it is listed as STOPPED until it is removed"
    _say(args, {"name": args.trainer, "home": str(home)}, words, "trainer ls")
    return 0


def _remove(args: argparse.Namespace) -> int:
    from slipstream.control_client import segment

    with control_api(args) as client:
        client.delete(f"/v1/trainers/{segment(args.trainer)}")
    _say(args, {"name": args.trainer}, f"{args.trainer} is forgotten", "trainer ls")
    return 0


def _is_api_of_stack(args: argparse.Namespace, home: Path) -> bool:
    from slipstream.launcher.home import is_up, read_supervisor

    stack = read_supervisor(home)
    return stack is not None and is_up(home) and find_api(args).address == stack.api


def _unused_device(home: Path) -> str:
    """A GPU on which nothing of the stack runs; the CPU where there is no GPU.

    Raises:
        SlipstreamError: ENVIRONMENT_UNSUPPORTED, every GPU is in use.
    """
    from slipstream.launcher.stack import read_stack
    from slipstream.machine_probe import probe_torch

    stack = read_stack(home)
    devices = [trainer.device for trainer in stack.trainers] if stack else []
    if stack is not None and stack.target is not None:
        devices += stack.target.device.split(",")
    used = {"cuda:0" if device == "cuda" else device for device in devices}
    gpus = [f"cuda:{index}" for index in range(len(probe_torch().gpus))]
    free = [gpu for gpu in gpus if gpu not in used] if gpus else ["cpu"]
    if not free:
        raise SlipstreamError(
            f"the stack uses every GPU of this machine: {', '.join(gpus)}",
            reason=Reason.ENVIRONMENT_UNSUPPORTED,
            remedy=f"Name one that is to be shared, such as --device {gpus[-1]}.",
        )
    return free[0]


def _require_present(device: str) -> None:
    """Refuse a GPU that is not there: in the stack its agent would be started again and again.

    Raises:
        SlipstreamError: SPEC_INVALID, ENVIRONMENT_UNSUPPORTED.
    """
    from slipstream.engine_devices import check_present
    from slipstream.launcher.stack import require_device
    from slipstream.machine_probe import probe_torch

    require_device(device)
    if device != "cpu":  # asking torch takes seconds
        check_present([device], len(probe_torch().gpus), "--device")


def _become_agent(args: argparse.Namespace) -> int:
    """This process goes on as the agent, so that Ctrl-C and signals reach it. The agent says whether it may join."""
    from slipstream.stand_in import as_typed

    access = find_api(args)
    command = [sys.executable, "-m", "drafter_trainer", "worker", "--api", access.address, "--device", args.device]
    for flag, value in (("--name", args.name), ("--runs", args.runs), ("--state", args.state)):
        if value is not None:
            command += [flag, str(value)]
    token = {"SLIPSTREAM_TOKEN": access.token} if access.token else {}
    os.execve(sys.executable, command, os.environ | token | as_typed("slipstream trainer start", "worker"))


HANDLERS = {
    "start": _start,
    "stop": _stop,
    "ls": _list,
    "attach": _attach,
    "detach": _detach,
    "remove": _remove,
}
