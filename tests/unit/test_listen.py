"""Listen addresses, what counts as loopback, and where the token comes from."""

import os
from pathlib import Path

import pytest

from slipstream.errors import SlipstreamError
from slipstream.listen import ListenAddress, read_token
from slipstream.run_spec.reasons import Reason


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("127.0.0.1:8080", "127.0.0.1", 8080), ("localhost:0", "localhost", 0), ("[::1]:65535", "::1", 65535)],
)
def test_address_round_trip(text: str, host: str, port: int) -> None:
    address = ListenAddress.parse(text)
    assert address == ListenAddress(host, port)
    assert str(address) == text


@pytest.mark.parametrize("text", ["", "8080", ":8080", "host:", "host:http", "host:65536", "host:-1", "::1:8080"])
def test_malformed_address(text: str) -> None:
    with pytest.raises(SlipstreamError, match="HOST:PORT") as refused:
        ListenAddress.parse(text)
    assert refused.value.reason is Reason.SPEC_INVALID


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.9.10", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example.com", False),
    ],
)
def test_only_loopback_is_served_without_a_token(host: str, loopback: bool) -> None:
    address = ListenAddress(host, 1)
    assert address.is_loopback is loopback
    address.require_token("secret")
    if loopback:
        address.require_token(None)
        return
    for nothing in (None, ""):
        with pytest.raises(SlipstreamError):
            address.require_token(nothing)


def test_port_zero_binds_a_free_port() -> None:
    with ListenAddress.parse("127.0.0.1:0").bind() as bound:
        host, port = bound.getsockname()
        assert host == "127.0.0.1"
        bound.listen()
        with pytest.raises(SlipstreamError) as refused:
            ListenAddress(host, port).bind()
    assert refused.value.reason is Reason.PORT_IN_USE


def test_address_of_another_machine() -> None:
    with pytest.raises(SlipstreamError, match="cannot listen on 192.0.2.7") as refused:
        ListenAddress("192.0.2.7", 0).bind()
    assert refused.value.reason is Reason.SPEC_INVALID


def test_token_file_wins_over_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "from-environment")
    file = tmp_path / "token"
    file.write_text("from-file\n")
    assert read_token(file) == "from-file"
    assert read_token(None) == "from-environment"
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "")
    assert read_token(None) is None


def test_the_environment_may_name_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = tmp_path / "named"
    named.write_text("from-named-file\n")
    monkeypatch.delenv("SLIPSTREAM_TOKEN", raising=False)
    monkeypatch.setenv("SLIPSTREAM_TOKEN_FILE", str(named))
    assert read_token(None) == "from-named-file"
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "from-environment")
    assert read_token(None) == "from-environment"
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "")
    named.write_text("")
    with pytest.raises(SlipstreamError, match="is empty"):
        read_token(None)


def test_unreadable_token_file(tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match=os.strerror(2)):
        read_token(tmp_path / "absent")
