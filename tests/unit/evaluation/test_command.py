"""Which loop decodes follows from the flags and the device, and is never chosen in silence."""

import argparse
import json
from pathlib import Path

import pytest
import torch

from drafter_trainer.cli import main
from drafter_trainer.evaluation.command import JSON, TEXT, add_arguments, make_plan
from drafter_trainer.evaluation.setting import DecodingPlan, Setting
from slipstream.errors import SlipstreamError
from slipstream.run_spec.load import load_recipe
from tests.fakes.exports import drawn_weights, exportable_config, write_checkpoint
from tests.fakes.tiny_run import write_tiny_run

RECIPE = Path(__file__).parents[3] / "recipes" / "smollm2-135m-1gpu.toml"


def plan(*flags: str) -> DecodingPlan:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return make_plan(parser.parse_args(["run", *flags]), Path(), load_recipe(RECIPE).spec)


@pytest.mark.parametrize(
    ("flags", "loop"),
    [
        (["--device", "cpu"], "caches that grow"),
        (["--device", "cuda"], "caches of fixed size, rounds as CUDA graphs"),
        (["--device", "cuda", "--no-graphs"], "caches that grow"),
        (["--device", "cuda", "--no-graphs", "--batch-sizes", "4"], "caches of fixed size, no graphs"),
        (["--device", "cpu", "--temperatures", "0.7"], "caches of fixed size, no graphs"),
        (["--device", "cuda", "--compile"], "caches of fixed size, rounds as CUDA graphs, compiled"),
    ],
)
def test_the_loop(flags: list[str], loop: str) -> None:
    assert plan(*flags).loop_in_words() == loop


def test_settings_are_all_batch_sizes_at_every_temperature() -> None:
    settings = plan("--device", "cpu", "--batch-sizes", "1,4,4", "--temperatures", "0,1").settings
    assert settings == (Setting(1, 0), Setting(4, 0), Setting(1, 1), Setting(4, 1))


def test_graphs_on_a_cpu_are_refused() -> None:
    with pytest.raises(SlipstreamError, match="--graphs needs a CUDA device, decoding runs on cpu"):
        plan("--device", "cpu", "--graphs")


@pytest.mark.parametrize("flags", [["--batch-sizes", "0"], ["--temperatures", "-1"], ["--temperatures", "nan"]])
def test_sizes_and_temperatures_that_make_no_sense(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plan(*flags)
    assert "error: argument" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "threads"),
    [([], 1), (["--jobs", "2"], 1), (["--threads", "4"], 4), (["--threads", "4", "--jobs", "2"], 2)],
)
def test_a_process_on_a_cpu_decodes_with_one_thread_unless_told(flags: list[str], threads: int) -> None:
    assert plan("--device", "cpu", *flags).threads == threads


@pytest.mark.parametrize(
    ("flags", "threads"),
    [
        (["--batch-sizes", "8"], 64),
        (["--batch-sizes", "1,8", "--jobs", "4"], 64),
        (["--batch-sizes", "8", "--threads", "4", "--jobs", "2"], 4),
        (["--jobs", "4"], 1),
    ],
)
def test_the_one_process_that_decodes_batches_uses_all_cores(
    flags: list[str], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert plan("--device", "cpu", *flags).threads == threads


@pytest.mark.parametrize(("given", "meant"), [("json", JSON), ("text", TEXT), ("r.json", Path("r.json"))])
def test_where_the_report_goes(given: str, meant: str | Path) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert parser.parse_args(["run", "-o", given]).output == meant


def test_a_slip_in_json_writes_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plan("-o", "jsno")
    assert "'jsno' is neither text, json nor a file such as eval.json" in capsys.readouterr().err


def test_json_alone_on_stdout_and_how_far_it_is_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = exportable_config()
    write_checkpoint(write_tiny_run(tmp_path), tmp_path / "run", config, drawn_weights(config))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "why?"}\n')
    flags = ["--prompts", str(tmp_path / "prompts.jsonl"), "--max-new-tokens", "4", "--device", "cpu"]
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "run"), *flags, "-o", "json"]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert report["lossless"] is True and report["settings"]["threads_per_process"] == 1
    assert report["settings"]["checkpoint"] == "step-00000012"
    assert " decoding prompts=1 processes=1" in printed.err and " decoded prompts=1/1" in printed.err
