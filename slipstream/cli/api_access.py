"""Which control API a command talks to, and with which token; its refusals in the words of the command line."""

import argparse
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.errors import SlipstreamError

if TYPE_CHECKING:
    from slipstream.control_client import ControlApiRefusalError, ControlClient

_API_FLAGS: tuple[str, ...] = ("--api", "--token-file", "--home")
_FLAGS_OF = dict.fromkeys(("run", "trainer", "target", "checkpoint", "eval"), _API_FLAGS) | {"up": ("--home",)}
_KINDS = {"RUN_UNKNOWN": "run", "TARGET_UNKNOWN": "target", "TRAINER_UNKNOWN": "trainer"}


def add_api_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of every command that prints what a control API says."""
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="default: text")
    add_access_flags(parser)


def add_access_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of every command that talks to a control API."""
    access = parser.add_argument_group("control API")
    access.add_argument(
        "--api",
        metavar="URL",
        help="default: $SLIPSTREAM_API, else that of the local stack, else http://127.0.0.1:8080",
    )
    access.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="default: $SLIPSTREAM_TOKEN, else the file $SLIPSTREAM_TOKEN_FILE, else the stack's",
    )
    access.add_argument(
        "--home", type=Path, metavar="DIR", help="of the local stack; default: $SLIPSTREAM_HOME, else ~/.slipstream"
    )


@dataclass(frozen=True)
class ApiAccess:
    """Where the control API is, and what lets us in."""

    address: str
    token: str | None


def find_api(args: argparse.Namespace) -> ApiAccess:
    """From the flags, the environment, the local stack, in this order.

    Raises:
        SlipstreamError: the token file or the state of the stack is not readable.
    """
    from slipstream.control_client import DEFAULT_ADDRESS
    from slipstream.launcher.home import home_directory, read_supervisor
    from slipstream.listen import read_token

    named = args.api or os.environ.get("SLIPSTREAM_API")
    token = read_token(args.token_file)
    if named and token:
        return ApiAccess(named, token)
    stack = read_supervisor(home_directory(args.home))
    address = named or (stack.api if stack else DEFAULT_ADDRESS)
    # Another server is never shown the token of this one.
    if token is None and stack is not None and stack.token_file and _same(address, stack.api):
        token = read_token(Path(stack.token_file))
    return ApiAccess(address, token)


def _same(one: str, other: str) -> bool:
    return one.removeprefix("http://").rstrip("/") == other.removeprefix("http://").rstrip("/")


@contextmanager
def control_api(args: argparse.Namespace) -> "Iterator[ControlClient]":
    """A client of the API that the command line means.

    Raises:
        SlipstreamError: what the API refuses, with what to type next; or nobody answers.
    """
    from slipstream.control_client import ControlApiRefusalError, ControlClient

    access = find_api(args)
    with ControlClient(access.address, access.token, on_delay=_say_delay) as client:
        try:
            yield client
        except ControlApiRefusalError as refusal:
            message, remedy = _at_a_command_line(refusal, client, args, has_token=access.token is not None)
            raise SlipstreamError(message, reason=refusal.reason, remedy=remedy) from refusal


def _say_delay(why: SlipstreamError) -> None:
    print(f"{why.message}; trying again", file=sys.stderr)


def _at_a_command_line(
    refusal: "ControlApiRefusalError", client: "ControlClient", args: argparse.Namespace, *, has_token: bool
) -> tuple[str, str]:
    """Message and remedy: what a REST client would do next is not what a person at a terminal does."""
    message, reason = refusal.message, str(refusal.reason)
    if reason in _KINDS and getattr(args, _KINDS[reason], None):
        kind = _KINDS[reason]
        return message.partition(" GET /v1/")[0], _nearest_of(kind, getattr(args, kind), client)
    if reason == "TARGET_UNKNOWN" and not getattr(args, "target", None):
        remedy = "`slipstream up` brings one up; control-api is told of one that runs with --target NAME=HOST:PORT."
        return message.partition(" Start a target server")[0], remedy
    run, verbs = getattr(args, "run", None), refusal.problem.get("allowed_verbs")
    if reason == "TRANSITION_ILLEGAL" and run and verbs:
        commands = ", ".join(f"`slipstream run {verb} {shlex.quote(run)}`" for verb in verbs)
        return message.partition(" Allowed now: ")[0], f"Possible now: {commands}."
    if reason == "ACCESS_DENIED":
        given = "The token that was given is not the one it asks for. " if has_token else ""
        return message, f"{given}Give its token with --token-file or SLIPSTREAM_TOKEN."
    return message, ""


def _nearest_of(kind: str, name: str, client: "ControlClient") -> str:
    from slipstream.run_spec.suggestions import nearest

    hint = ""
    with suppress(SlipstreamError):
        close = nearest(name, [one["name"] for one in client.listing(f"/v1/{kind}s")])
        others = [] if close else [one for one in _KINDS.values() if one != kind]
        mistaken = next(
            (one for one in others if any(name == it["name"] for it in client.listing(f"/v1/{one}s"))), None
        )
        hint = f"Did you mean {close}? " if close else f"{name} is a {mistaken}. " if mistaken else ""
    return f"{hint}`slipstream {kind} ls` lists the {kind}s."


def say_next(args: argparse.Namespace, *commands: str) -> None:
    """Print commands that are useful now, on stderr; with the flags of this one that lead to the same API."""
    if args.output == "json":
        return
    given = {"--api": args.api, "--token-file": args.token_file, "--home": args.home}
    for command in commands:
        known = _FLAGS_OF.get(command.split()[0], ())
        flags = "".join(f" {flag} {shlex.quote(str(given[flag]))}" for flag in known if given[flag])
        print(f"next: slipstream {command}{flags}", file=sys.stderr)
