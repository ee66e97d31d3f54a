"""Flags of export and import that cannot mean anything are refused before torch is imported."""

import pytest
import torch

from drafter_trainer.cli import build_parser
from drafter_trainer.formats.command import _limit_threads
from slipstream.cli.commands import checkpoint

EXPORT = ["export", "run", "--to", "vllm", "--output", "out"]
IMPORT = ["import", "drafter", "--target-model", "model"]


@pytest.mark.parametrize("flag", ["--device=banana", "--device=", "--threads=0", "--threads=-1", "--threads=many"])
@pytest.mark.parametrize("command", [EXPORT, IMPORT])
def test_no_device_and_no_number_of_threads(command: list[str], flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        build_parser().parse_args([*command, flag])
    said = capsys.readouterr().err
    assert refused.value.code == 2 and ("is no device, expected" in said or "is no number of threads from 1" in said)


@pytest.mark.parametrize("name", ["evil\n---\nlicense: mit", "", "\x1b[31mred"])
def test_a_name_that_would_break_the_head_of_the_model_card(name: str) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args([*EXPORT, f"--target-name={name}"])


def test_what_is_taken() -> None:
    for device in ("cpu", "cuda", "cuda:1"):
        assert build_parser().parse_args([*IMPORT, "--device", device, "--threads", "4"]).device == device


def test_the_target_to_decode_with_has_one_name() -> None:
    """As of the evaluation; --target is a target server elsewhere, and was this model here once."""
    assert build_parser().parse_args([*EXPORT, "--target-model", "m", "--target-name", "n"]).target_model == "m"
    assert build_parser().parse_args(["import", "drafter", "--target", "m"]).target_model == "m"


def test_the_command_line_passes_on_flags_that_there_are() -> None:
    values = {"--dtype": "float32", "--device": "cpu", "--threads": "1"}
    flags = [word for flag, *_ in checkpoint._PASSED_ON for word in (flag, values.get(flag, "x"))]
    build_parser().parse_args([*EXPORT, *flags, *(flag for flag, _ in checkpoint._SWITCHES)])


@pytest.mark.parametrize(("flags", "threads"), [([], 1), (["--threads", "3"], 3), (["--device", "cuda"], None)])
def test_one_thread_decodes_on_a_cpu_unless_told(
    flags: list[str], threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    args = build_parser().parse_args([*EXPORT, *flags])
    _limit_threads(args.threads, args.device)
    assert chosen == ([] if threads is None else [threads])
