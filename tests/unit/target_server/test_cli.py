"""Flags become settings, and what cannot be served is refused in words."""

import argparse
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from slipstream.errors import SlipstreamError
from slipstream.listen import ListenAddress
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import DataSpec, TargetSpec
from target_server.cli import choose_shelf_bytes, data_roots, main, parse_size, read_target, run_command
from target_server.ledger_store import LedgerStore
from tests.fakes.tiny_run import write_tiny_run

RECIPE = """
name = "run"
[target]
model = "./model"
[data]
files = ["data/a.jsonl", "data/b.jsonl", "/elsewhere/c.jsonl"]
[train]
max_steps = 10
"""


def test_the_target_comes_from_the_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    target, data = read_target(str(recipe), None, ["target.dtype=float32"])
    assert target == TargetSpec(model=str(tmp_path / "model"), dtype="float32")
    assert data is not None and data.files[0] == str(tmp_path / "data/a.jsonl")
    target, _ = read_target(str(recipe), "other/model", [])
    assert target.model == "other/model", "a flag starts at the working directory, not at the recipe's"


def test_a_model_needs_no_recipe() -> None:
    assert read_target(None, "m", ["target.dtype=float16"]) == (TargetSpec(model="m", dtype="float16"), None)


@pytest.mark.parametrize(
    "model, overrides, words",
    [
        (None, [], "neither a recipe nor a model"),
        ("m", ["train.max_steps=1"], "only \\[target\\] can be overridden, not train"),
        ("m", ["target.dtype=float33"], "target.dtype: found .*'bfloat16'"),
        ("m", ["target.dtyp=float32"], "target.dtyp: unknown key"),
        ("m", ["nonsense"], "not of the form key=value"),
    ],
)
def test_a_target_that_is_none(model: str | None, overrides: list[str], words: str) -> None:
    with pytest.raises(SlipstreamError, match=words) as caught:
        read_target(None, model, overrides)
    assert caught.value.reason is Reason.SPEC_INVALID


def test_who_may_name_which_files() -> None:
    data = DataSpec(files=("/data/a.jsonl", "/data/b.jsonl", "/more/c.jsonl"))
    here, network = ListenAddress("127.0.0.1", 1), ListenAddress("10.0.0.1", 1)
    assert data_roots(None, data, here) is None
    assert data_roots(None, data, network) == (Path("/data"), Path("/more"))
    assert data_roots(None, None, network) == ()
    assert data_roots([Path("/only")], data, here) == (Path("/only"),)


@pytest.mark.parametrize("text, size", [("1024", 1024), ("512MiB", 2**29), ("1.5 GiB", 3 * 2**29)])
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "4GB", "lots", "1e9"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size"):
        parse_size(text)


def test_the_default_shelf_leaves_half_of_shared_memory(tmp_path: Path) -> None:
    assert choose_shelf_bytes(123, tmp_path) == 123
    assert choose_shelf_bytes(None, None) == 4 * 2**30
    assert 0 < choose_shelf_bytes(None, tmp_path) <= 4 * 2**30


@pytest.mark.parametrize("flag", ["--threads", "--drain-seconds", "--subscription-timeout"])
@pytest.mark.parametrize("value", ["0", "-1", "many", "nan"])
def test_numbers_that_are_none(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run_command(["serve", "--model", "m", flag, value])
    assert caught.value.code == 2
    assert f"{flag}: {value!r} is no number of " in capsys.readouterr().err


def serve(tmp_path: Path, *more: str) -> list[str]:
    return [
        "serve",
        "--model",
        str(tmp_path / "nothing"),
        "--ledger",
        str(tmp_path / "ledger.sqlite"),
        "--no-shm",
        *more,
    ]


def test_other_machines_need_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLIPSTREAM_TOKEN", raising=False)
    with pytest.raises(SlipstreamError, match="no token is set"):
        run_command(serve(tmp_path, "--listen", "0.0.0.0:0"))


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(SlipstreamError, match=f"{address} is in use") as caught:
            run_command(serve(tmp_path, "--listen", address))
    assert caught.value.reason is Reason.PORT_IN_USE


def test_a_port_that_is_taken_while_the_server_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        # It was free a moment ago.
        monkeypatch.setattr(ListenAddress, "bind", lambda _: socket.socket())
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(SlipstreamError, match=f"{address} is in use") as caught:
            run_command(serve(tmp_path, "--listen", address))
    assert caught.value.reason is Reason.PORT_IN_USE
    assert "--target-listen" in caught.value.remedy


def test_shared_memory_without_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=0, used=0, free=0))
    assert choose_shelf_bytes(None, tmp_path) == 4 * 2**30


def test_a_shared_memory_directory_that_does_not_exist(tmp_path: Path) -> None:
    arguments = [each for each in serve(tmp_path, "--listen", "127.0.0.1:0") if each != "--no-shm"]
    with pytest.raises(SlipstreamError, match="does not exist or is not a directory") as caught:
        run_command([*arguments, "--shm-dir", str(tmp_path / "none")])
    assert caught.value.reason is Reason.ENVIRONMENT_UNSUPPORTED


def test_an_old_port_file_that_cannot_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(_self: Path, **_options: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch, pytest.raises(SlipstreamError, match="port file .*Permission denied"):
        patch.setattr(Path, "unlink", denied)
        run_command(serve(tmp_path, "--listen", "127.0.0.1:0", "--port-file", str(tmp_path / "port")))


def test_a_port_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match="port file"):
        run_command(serve(tmp_path, "--listen", "127.0.0.1:0", "--port-file", str(tmp_path / "no" / "port")))


def test_a_model_that_does_not_exist_ends_the_process_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["target-server", *serve(tmp_path, "--listen", "127.0.0.1:0")])
    assert main() == 3
    error = capsys.readouterr().err
    assert "nothing' does not exist" in error
    assert "Traceback" not in error


def refused_at_start(arguments: list[str], words: str, reason: Reason) -> None:
    with pytest.raises(SlipstreamError, match=words) as caught:
        run_command(arguments)
    assert caught.value.reason is reason and caught.value.remedy


def test_two_servers_on_one_ledger(tmp_path: Path) -> None:
    first = LedgerStore(tmp_path / "ledger.sqlite")
    words = rf"in use by another target server \(process {os.getpid()}\)"
    refused_at_start(serve(tmp_path, "--listen", "127.0.0.1:0"), words, Reason.ENVIRONMENT_UNSUPPORTED)
    first.close()


def test_shared_memory_that_does_not_hold_the_shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=2**26, used=2**24, free=2**26 - 2**24))
    arguments = [each for each in serve(tmp_path, "--listen", "127.0.0.1:0") if each != "--no-shm"]
    words = r"--shelf-bytes is 1,024\.0 MiB; .* has 48\.0 MiB free of 64\.0 MiB"
    flags = ["--shm-dir", str(tmp_path), "--shelf-bytes", "1GiB"]
    refused_at_start([*arguments, *flags], words, Reason.ENVIRONMENT_UNSUPPORTED)


def test_a_ring_too_small_for_packs_of_the_recipe(tmp_path: Path) -> None:
    recipe = write_tiny_run(tmp_path)
    arguments = [
        "serve",
        str(recipe),
        "--device",
        "cpu",
        "--no-shm",
        "--listen",
        "127.0.0.1:0",
        "--shelf-bytes",
        "64KiB",
    ]
    words = r"The shelf has 0\.1 MiB; a stream with packs of .* MiB needs at least 4 of them"
    flags = ["--ledger", str(tmp_path / "ledger.sqlite"), "--probe-bytes", "64KiB"]
    refused_at_start([*arguments, *flags], words, Reason.OUT_OF_MEMORY)
