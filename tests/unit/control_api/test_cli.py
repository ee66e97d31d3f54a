"""What the command line refuses before anything is served."""

import socket
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from control_api.cli import serve
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason


@pytest.fixture(autouse=True)
def _no_token_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLIPSTREAM_TOKEN", raising=False)


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.7:0", "example.invalid:0"])
def test_other_machines_need_a_token(address: str) -> None:
    with pytest.raises(SlipstreamError, match="no token is set") as refused:
        serve(["--listen", address])
    assert refused.value.reason is Reason.SPEC_INVALID
    assert "SLIPSTREAM_TOKEN" in refused.value.remedy


def test_empty_token_file_is_no_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(" \n")
    with pytest.raises(SlipstreamError, match="is empty"):
        serve(["--listen", "127.0.0.1:0", "--token-file", str(tmp_path / "token")])


def test_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(SlipstreamError, match=address) as refused:
            serve(["--listen", address])
    assert refused.value.reason is Reason.PORT_IN_USE


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon"])
def test_times_are_positive(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        serve(["--listen", "127.0.0.1:0", "--grace-seconds", seconds])
    assert refused.value.code == 2
    assert "--grace-seconds" in capsys.readouterr().err


def missing_directory(path: Path) -> str:
    return f"{path}/none/a.sqlite"


def newer(path: Path) -> str:
    with closing(sqlite3.connect(path / "a.sqlite")) as connection:
        connection.execute("PRAGMA user_version = 999")
    return f"{path}/a.sqlite"


def another_file(path: Path) -> str:
    (path / "a.sqlite").write_text("dear diary, " * 1000)
    return f"{path}/a.sqlite"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (missing_directory, Reason.DATABASE_READ_ONLY),
        (newer, Reason.DATABASE_NEWER),
        (another_file, Reason.DATABASE_INVALID),
    ],
)
def test_a_database_that_cannot_be_used_is_refused_before_serving(
    tmp_path: Path, make: Callable[[Path], str], reason: Reason
) -> None:
    with pytest.raises(SlipstreamError) as refused:
        serve(["--listen", "127.0.0.1:0", "--database", f"sqlite:///{make(tmp_path)}"])
    assert refused.value.reason is reason
    assert refused.value.remedy
