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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (":99999", "--listen is ':99999'; port 99999 is out of range, expected HOST:PORT with a port from 0 to 65535"),
        ("127.0.0.1:65536", "port 65536 is out of range"),
        ("127.0.0.1:" + "9" * 5000, "9 is out of range"),
        (":8080", "--listen is ':8080'; no host is named, expected HOST:PORT"),
    ],
)
def test_what_is_wrong_with_an_address(text: str, words: str) -> None:
    with pytest.raises(SlipstreamError) as refused:
        ListenAddress.parse(text)
    assert words in refused.value.message
    with pytest.raises(SlipstreamError) as of_another_flag:
        ListenAddress.parse(text, "--target-listen")
    assert "Example: --target-listen " in of_another_flag.value.remedy


def test_zeros_before_a_port_are_none() -> None:
    assert ListenAddress.parse("localhost:0000000080").port == 80


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


@pytest.mark.parametrize("token", ["\xe9", "a\nb", "a\x00b"])
def test_what_no_header_can_carry_is_no_token(token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    for content in (token.encode(), token.encode("latin-1") + b"\xff\xfe"):
        file.write_bytes(content)
        with pytest.raises(SlipstreamError, match=f"what the token file {file} holds is no token") as refused:
            read_token(file)
        assert refused.value.reason is Reason.SPEC_INVALID and token not in refused.value.message
    if "\x00" not in token:  # which no environment can hold
        monkeypatch.setenv("SLIPSTREAM_TOKEN", token)
        with pytest.raises(SlipstreamError, match="what .SLIPSTREAM_TOKEN holds is no token"):
            read_token(None)


def test_unreadable_token_file(tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match=os.strerror(2)):
        read_token(tmp_path / "absent")
