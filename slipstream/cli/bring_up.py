"""What `slipstream up` does: plan, check, start; say what comes up, and where everything is."""

import argparse
import os
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO

from slipstream.cli.exit_status import DETACHED
from slipstream.errors import SlipstreamError
from slipstream.launcher.differing import differences
from slipstream.launcher.home import (
    Home,
    SupervisorState,
    home_directory,
    is_up,
    read_supervisor,
    take_over,
    writing,
)
from slipstream.launcher.planning import Wanted, example_run, plan_stack
from slipstream.launcher.running import given_up, prepare, start_supervisor, wait_until_ready
from slipstream.launcher.stack import ServicePart, Stack, read_stack, write_stack
from slipstream.launcher.supervisor import Supervisor
from slipstream.listen import ListenAddress, read_token
from slipstream.packaged_model import packaged_path
from slipstream.run_spec.reasons import Reason
from slipstream.target_files import is_path, locate_target


def bring_up(args: argparse.Namespace) -> int:
    """Do what the parsed command line of `slipstream up` says; returns the exit status.

    Raises:
        SlipstreamError: whatever keeps the stack from coming up.
    """
    home = home_directory(args.home)
    token = _given_token(args)
    wanted = _wanted(args, home if token else None)
    if is_up(home):
        return _already_up(args, home, wanted)
    stack = plan_stack(wanted, read_stack(home), working_directory=Path.cwd())
    if stack.target is not None and wanted.names_a_target and is_path(stack.target.model.model):
        # Before anything starts: a stack would load torch to find out.
        locate_target(stack.target.model)
    if stack.target is not None and wanted.recipe is not None and stack.target.model.model == packaged_path():
        _say(f"the target is the copy of its model that comes as a package, in four bits: {packaged_path()}")
    _require_token(stack, token)
    lock = take_over(home)
    if lock is None:  # somebody was quicker
        return _already_up(args, home, wanted)
    with lock:
        if token:
            _keep_token(Home(home), token)
        prepare(stack, home)
        return _detach(args, home, lock) if args.detach else _stay(args, home)


def _given_token(args: argparse.Namespace) -> str | None:
    """The token of the environment, where no file was named: it is kept in the home, for whoever starts again."""
    if args.token_file is not None:
        read_token(args.token_file)  # refuses what is no token
        return None
    return read_token(None)


def _wanted(args: argparse.Namespace, home_of_token: Path | None) -> Wanted:
    return Wanted(
        recipe=args.recipe,
        model=args.model,
        overrides=tuple(args.set),
        listen=args.listen,
        target_listen=args.target_listen,
        trainers=args.trainers,
        devices=args.devices,
        tensor_parallel=args.tensor_parallel,
        trainer_devices=args.trainer_devices,
        no_target=args.no_target,
        data_roots=tuple(args.data_root),
        token_file=Home(home_of_token).token_file if home_of_token else args.token_file,
    )


def _require_token(stack: Stack, given: str | None) -> None:
    """Refuse to serve other machines without a token, before anything is written."""
    token = given or (read_token(Path(stack.token_file)) if stack.token_file else None)
    parts: list[ServicePart] = [stack.api, *([stack.target] if stack.target else [])]
    for part in parts:
        ListenAddress.parse(part.listen).require_token(token)


def _keep_token(home: Home, token: str) -> None:
    with writing(home.token_file):
        descriptor = os.open(home.token_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(token + "\n")


def _stay(args: argparse.Namespace, home: Path) -> int:
    """Be the supervisor, until a signal."""
    seen = _Seen()

    def on_state(state: SupervisorState) -> None:
        if state.state == "READY" and not seen.announced:
            seen.announced = True
            ending = "Ctrl-C stops it in order, trainers save first; a second Ctrl-C hurries"
            _announce(args, read_stack(home), state, ending)
        if state.state != "STOPPING":
            seen.state = state

    if Supervisor(home, say=_say, on_state=on_state).run():
        return 0
    assert seen.state is not None, "a process was given up"
    raise given_up(seen.state, home)


class _Seen:
    """What the supervisor has said of itself."""

    announced = False
    state: SupervisorState | None = None


def _detach(args: argparse.Namespace, home: Path, lock: IO[bytes]) -> int:
    """Start a supervisor in the background; wait until all is ready."""
    supervisor = start_supervisor(home, lock)
    lock.close()
    try:
        state = wait_until_ready(supervisor, home, _say)
    except KeyboardInterrupt:
        _say(f"the stack goes on coming up in the background; `slipstream down{_flags(args)}` stops it")
        return DETACHED
    _announce(args, read_stack(home), state, f"`slipstream down{_flags(args)}` stops it in order, trainers save first")
    return 0


def _already_up(args: argparse.Namespace, home: Path, wanted: Wanted) -> int:
    """Nothing to start; what had been given up is tried again.

    Raises:
        SlipstreamError: STACK_DIFFERS.
    """
    stack, state = read_stack(home), read_supervisor(home)
    if stack is None or state is None:
        raise SlipstreamError(
            f"a stack is just being brought up, or stopped, in {home}",
            reason=Reason.STACK_DIFFERS,
            remedy="Try again in a moment.",
        )
    if found := differences(wanted, stack):
        create = "; a run gets its own with `slipstream run create RECIPE --set KEY=VALUE`" if wanted.overrides else ""
        raise SlipstreamError(
            f"a stack with other settings is up in {home}, and nothing of it was changed. Asked is {'; '.join(found)}.",
            reason=Reason.STACK_DIFFERS,
            remedy=f"Stop it with `slipstream down{_flags(args)}` and give this `slipstream up` again: its runs go on "
            f"from where they were saved. Or give another --home{create}.",
        )
    if state.state == "DEGRADED":
        write_stack(home, stack)  # a change, if only of the time: the supervisor tries again
        lost = ", ".join(process.name for process in state.processes if process.state == "GAVE_UP")
        _say(f"up but for what had been given up and is tried again now: {lost}; its log says how that goes")
    else:
        late = ", ".join(process.name for process in state.processes if process.state == "STARTING")
        _say(f"already up, still starting: {late}" if late else "already up")
    if wanted.recipe is not None and stack.target is not None:
        stack = stack.model_copy(update={"example": example_run(wanted, stack.target.model, stack.trainers)})
    _announce(args, stack, state, f"`slipstream down{_flags(args)}` stops it in order, trainers save first")
    return 0


def _announce(args: argparse.Namespace, stack: Stack | None, state: SupervisorState, ending: str) -> None:
    """Where everything is, and what to do next."""
    if args.output == "json":
        _print(state.model_dump_json())
        return
    trainers = ", ".join(trainer.name for trainer in stack.trainers) if stack else ""
    _print(f"control API  {state.api}")
    _print(f"dashboard    {state.dashboard}")
    if state.token_file:
        _print(f"token        in {state.token_file}")
    if stack and stack.target:
        _print(f"target       {stack.target.name} at {state.target}: {stack.target.model.model}")
    _print(f"trainers     {trainers or 'none'}")
    _print(f"logs         {Home(home_directory(args.home)).logs}")
    if stack and stack.example:
        _say(f"next: slipstream run create {shlex.join(stack.example)}{_flags(args)}")
    _say(ending)


def _flags(args: argparse.Namespace) -> str:
    return f" --home {shlex.quote(str(args.home))}" if args.home else ""


def _say(sentence: str) -> None:
    """On stderr. A terminal that was closed ends nothing: the stack is stopped in order all the same."""
    with suppress(OSError, ValueError):
        print(sentence, file=sys.stderr, flush=True)


def _print(line: str) -> None:
    with suppress(OSError, ValueError):
        print(line, flush=True)
