"""Commands of `slipstream` that another program carries out: help and errors of that program name what was typed."""

import argparse
import os
import sys
from collections.abc import Sequence

from slipstream.child_processes import child_process, exit_status, sigterm_as_exit

_TYPED = "SLIPSTREAM_TYPED"
"""COMMAND=WORDS: what a person typed, where this process runs COMMAND of its program in place of it."""


def run_for(typed: str, module: str, arguments: Sequence[str]) -> int:
    """Start `python -m module` and wait for it; returns its exit status. It ends with this process.

    Args:
        typed: what a person typed for it, such as `slipstream checkpoint export`.
        module: a program of ours, whose parser calls `answer_as_typed`.
        arguments: its command, then flags.
    """
    environment = as_typed(typed, arguments[0])
    with sigterm_as_exit(), child_process([sys.executable, "-m", module, *arguments], environment=environment) as child:
        return exit_status(child)


def as_typed(typed: str, command: str) -> dict[str, str]:
    """The environment in which a program's `command` is called what was typed."""
    return {_TYPED: f"{command}={typed}"}


def own_help(words: str | None) -> str | None:
    """Help of a flag that only this program's own command has: hidden from who typed another one."""
    return argparse.SUPPRESS if _TYPED in os.environ else words


def answer_as_typed(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Let usage, help and errors of the command name what was typed; nothing changes where that is this program.

    Called last of a parser's making: it takes the words out of the environment, since what this process starts was
    typed by nobody.
    """
    command, _, typed = os.environ.pop(_TYPED, "").partition("=")
    if typed and command in commands.choices:
        commands.choices[command].prog = typed
