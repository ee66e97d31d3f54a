"""Which control API a command finds, with which token, and what it says when there is none."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from control_api.app import create_app
from control_api.settings import Settings
from control_api.store.database import Database
from slipstream import control_client
from slipstream.cli.api_access import ApiAccess, find_api, say_next
from slipstream.errors import SlipstreamError
from slipstream.launcher.home import Home, SupervisorState
from tests.fakes.http_server import serving
from tests.unit.cli.conftest import Command

DEFAULT = "http://127.0.0.1:8080"
STACK = "http://127.0.0.1:4711"


def arguments(**given: Any) -> argparse.Namespace:
    return argparse.Namespace(**({"api": None, "token_file": None, "home": None, "output": "text"} | given))


@pytest.fixture
def stack(home: Path) -> Path:
    """A home whose stack has a token."""
    home.mkdir()
    (home / "token").write_text("of the stack\n")
    state = SupervisorState(
        pid=1, state="READY", api=STACK, dashboard="", token_file=str(home / "token"), target=None, processes=()
    )
    Home(home).supervisor_file.write_text(state.model_dump_json())
    return home


def test_nothing_is_said(home: Path) -> None:
    assert find_api(arguments()) == ApiAccess(DEFAULT, None)


def test_the_local_stack(stack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_api(arguments()) == ApiAccess(STACK, "of the stack")
    monkeypatch.delenv("SLIPSTREAM_HOME")
    assert find_api(arguments(home=stack)) == ApiAccess(STACK, "of the stack")
    assert find_api(arguments(home=stack / "empty")) == ApiAccess(DEFAULT, None)


def test_what_is_said_goes_first(stack: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLIPSTREAM_API", "http://env:1")
    assert find_api(arguments()) == ApiAccess("http://env:1", None)
    assert find_api(arguments(api="http://flag:1")) == ApiAccess("http://flag:1", None)
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "of the environment")
    assert find_api(arguments()) == ApiAccess("http://env:1", "of the environment")
    token = tmp_path / "mine"
    token.write_text("of the file")
    assert find_api(arguments(token_file=token)) == ApiAccess("http://env:1", "of the file")


def test_the_token_of_the_stack_is_shown_to_nobody_else(stack: Path) -> None:
    assert find_api(arguments(api="127.0.0.1:4711")).token == "of the stack"
    assert find_api(arguments(api=STACK + "/")).token == "of the stack"
    assert find_api(arguments(api="http://127.0.0.1:4712")).token is None


def test_a_damaged_stack_is_said(stack: Path) -> None:
    Home(stack).supervisor_file.write_text("{")
    with pytest.raises(SlipstreamError, match=r"supervisor\.json is damaged"):
        find_api(arguments())


def test_nobody_answers(slipstream: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_client, "_wait_before", lambda _attempt: None)
    for command in (("run", "ls"), ("run", "watch", "demo"), ("trainer", "ls"), ("target", "ls")):
        answer = slipstream(*command, "--api", "127.0.0.1:1")
        assert (answer.status, answer.out) == (15, "")
        first, second = answer.err.splitlines()
        assert first.startswith("error: no control API answers at http://127.0.0.1:1 (")
        assert second == "  remedy: Start one with `slipstream up`, or give its address with --api or SLIPSTREAM_API."


def test_an_address_that_is_none(slipstream: Command) -> None:
    assert slipstream("run", "ls", "--api", "ftp://x").status == 2


def test_tokens(slipstream: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = Database(f"sqlite:///{tmp_path}/control.sqlite")
    with serving(create_app(database, Settings(token="right"))) as address:
        monkeypatch.setenv("SLIPSTREAM_API", address)
        answer = slipstream("run", "ls")
        assert (answer.status, answer.out) == (16, "")
        assert "remedy: Give its token with --token-file or SLIPSTREAM_TOKEN." in answer.err
        monkeypatch.setenv("SLIPSTREAM_TOKEN", "wrong")
        answer = slipstream("run", "ls")
        assert answer.status == 16
        assert "The token that was given is not the one it asks for." in answer.err
        assert "wrong" not in answer.err.replace("wrong token", "")
        monkeypatch.setenv("SLIPSTREAM_TOKEN", "right")
        assert slipstream("run", "ls").status == 0
    database.close()


def test_next_commands_lead_to_the_same_api(capsys: pytest.CaptureFixture[str]) -> None:
    given = arguments(api="http://h:1", home=Path("/my home"))
    say_next(given, "run watch demo", "up", "eval demo", "plan my.toml")
    assert capsys.readouterr().err.splitlines() == [
        "next: slipstream run watch demo --api http://h:1 --home '/my home'",
        "next: slipstream up --home '/my home'",
        "next: slipstream eval demo --api http://h:1 --home '/my home'",
        "next: slipstream plan my.toml",
    ]
    say_next(arguments(output="json"), "run ls")
    assert capsys.readouterr().err == ""
