"""What `slipstream up` and `slipstream down` refuse or answer before anything is started."""

import socket
from pathlib import Path

import pytest

from slipstream.cli import bring_up
from slipstream.cli.main import run_command
from slipstream.errors import SlipstreamError
from slipstream.launcher.home import Home, take_over
from slipstream.launcher.stack import write_stack
from slipstream.run_spec.reasons import Reason
from tests.unit.launcher.stacks import a_stack

QUIET = ("--no-target", "--trainer-devices", "cpu", "--listen", "127.0.0.1:0")


@pytest.fixture(autouse=True)
def _no_token_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLIPSTREAM_TOKEN", raising=False)
    monkeypatch.delenv("SLIPSTREAM_TOKEN_FILE", raising=False)


def refused(home: Path, *arguments: str) -> SlipstreamError:
    with pytest.raises(SlipstreamError) as caught:
        run_command(["up", "--home", str(home), *arguments])
    return caught.value


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("--listen", "0.0.0.0:0", "--no-target", "--trainer-devices", "cpu"), 2, "no token is set"),
        ((*QUIET, "--token-file", "/no/such/file"), 2, "/no/such/file"),
        (("no-such-recipe",), 2, "no shipped recipe"),
        (("--no-target", "--model", "x"), 2, "--no-target"),
        ((*QUIET[:1], "--trainer-devices", "cpu", "--listen", "192.0.2.1:0", "--token-file", "TOKEN"), 2, "192.0.2.1"),
    ],
)
def test_refused_before_anything_is_written(tmp_path: Path, arguments: tuple[str, ...], status: int, says: str) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    home = tmp_path / "home"
    error = refused(home, *(str(token) if word == "TOKEN" else word for word in arguments))
    assert (error.exit_code, says in error.message) == (status, True), error.message
    assert error.remedy or status == 2
    assert not Home(home).stack_file.exists()


def test_a_port_in_use_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        error = refused(tmp_path / "home", *QUIET[:3], "--listen", address)
    assert error.reason is Reason.PORT_IN_USE and address in error.message
    assert not Home(tmp_path / "home").stack_file.exists()


def test_a_stack_that_is_just_coming_up_is_left_alone(tmp_path: Path) -> None:
    write_stack(tmp_path, a_stack())
    lock = take_over(tmp_path)
    assert lock is not None
    with lock:
        error = refused(tmp_path)
    assert error.exit_code == 18 and "just being brought up" in error.message


def test_down_without_a_stack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["down", "--home", str(tmp_path / "none")]) == 0
    assert "nothing runs in" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_the_token_of_the_environment_is_kept_privately(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "secret")
    monkeypatch.setattr(bring_up, "_stay", lambda _args, _home: 0)
    home = Home(tmp_path / "home")
    assert run_command(["up", "--home", str(home.root), *QUIET]) == 0
    assert home.token_file.read_text() == "secret\n"
    assert home.token_file.stat().st_mode & 0o777 == 0o600
    assert f'"token_file": "{home.token_file}"' in home.stack_file.read_text()
    # Whoever starts it again need not have it in the environment.
    monkeypatch.delenv("SLIPSTREAM_TOKEN")
    assert run_command(["up", "--home", str(home.root)]) == 0
    assert str(home.token_file) in home.stack_file.read_text()
