"""Targets named by flag or variable: read strictly, registered once, moved when their address changes."""

from pathlib import Path

import pytest

from control_api.cli import serve
from control_api.named_targets import parse_targets, register_targets
from control_api.store.database import Database
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from tests.fakes.control_plane import Desk


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLIPSTREAM_TARGETS", raising=False)


def test_flags_win_over_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_targets([]) == {}
    monkeypatch.setenv("SLIPSTREAM_TARGETS", "a=127.0.0.1:1, b=[::1]:2,")
    assert parse_targets([]) == {"a": "127.0.0.1:1", "b": "[::1]:2"}
    assert parse_targets(["c=box:3", "c=box:3"]) == {"c": "box:3"}


@pytest.mark.parametrize("flag", ["local", "=127.0.0.1:1", "Local=127.0.0.1:1", "a/b=127.0.0.1:1", "local=", "local=x"])
def test_what_names_no_target_is_refused(flag: str) -> None:
    with pytest.raises(SlipstreamError) as refused:
        parse_targets([flag])
    assert refused.value.reason is Reason.SPEC_INVALID and "127.0.0.1:50051" in refused.value.remedy


def test_one_name_has_one_address() -> None:
    with pytest.raises(SlipstreamError, match="two addresses for 'a'"):
        parse_targets(["a=box:1", "a=box:2"])


def test_refused_before_the_database_is_made(tmp_path: Path) -> None:
    database = tmp_path / "a.sqlite"
    with pytest.raises(SlipstreamError, match="--target has 'local'"):
        serve(["--listen", "127.0.0.1:0", "--database", f"sqlite:///{database}", "--target", "local"])
    assert not database.exists()


def test_registered_once_and_moved(desk: Desk, database: Database) -> None:
    register_targets(database, {"local": "127.0.0.1:1"}, now=5.0)
    desk.target("local", "REACHABLE")
    register_targets(database, {"local": "127.0.0.1:1"}, now=6.0)
    assert desk.get("targets/local")["status"] == "REACHABLE", "nothing changed"
    register_targets(database, {"local": "127.0.0.1:2", "other": "127.0.0.1:3"}, now=7.0)
    found = desk.get("targets")["targets"]
    assert [(one["name"], one["address"], one["status"]) for one in found] == [
        ("local", "127.0.0.1:2", "UNKNOWN"),
        ("other", "127.0.0.1:3", "UNKNOWN"),
    ]
