"""`drafter-trainer eval` as a process, on a checkpoint that a real trainer wrote."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from drafter_trainer.checkpoint_state import file_checksum
from drafter_trainer.evaluation.command import open_checkpoint
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from tests.fakes.process_group import survivors
from tests.fakes.processes import ManagedProcess, Processes
from tests.fakes.tiny_run import write_target
from tests.fakes.training import Trainer


@pytest.fixture(scope="module")
def trained(tiny_recipe: Path, target_address: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of three steps."""
    started = Processes()
    run = Trainer(started, tiny_recipe, tmp_path_factory.mktemp("eval") / "run", "name=eval", "train.max_steps=3")
    run.finish(target_address)
    started.close()
    return run.directory


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three prompts of two sources."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    records = [{"id": f"p{i}", "source": source, "prompt": f"why, number {i}?"} for i, source in enumerate("aba")]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def evaluate(processes: Processes, run: Path, *arguments: str | Path) -> ManagedProcess:
    flags = ("--device", "cpu", "--threads", "2")
    return processes.start("drafter_trainer", "eval", run, *flags, *arguments)


def test_several_processes_and_the_untrained_drafter(
    processes: Processes, trained: Path, prompts: Path, tmp_path: Path
) -> None:
    output = tmp_path / "eval.json"
    evaluation = evaluate(
        *(processes, trained, "--prompts", prompts, "--jobs", "2", "--compare-untrained"),
        *("--max-new-tokens", "10", "--output", output),
    )
    assert evaluation.wait_exit(timeout=120) == 0, evaluation.output
    assert "Target verified" in evaluation.output and "Lossless" in evaluation.output
    assert " decoded prompts=3/3" in evaluation.output, "no terminal: a line, no bar"
    report = json.loads(output.read_text())
    assert report["lossless"] is True and report["differences"] == {"untrained": [], "trained": []}
    assert report["settings"]["target_verified"] is True
    assert report["settings"]["unproven_answers"]["file"] == "conversations.jsonl"
    assert report["settings"]["processes"] == 2
    assert set(report["results"]) == {"plain", "untrained", "trained"}
    for rows in report["results"].values():
        assert {source: row["prompts"] for source, row in rows.items()} == {"a": 2, "b": 1, "all": 3}
        assert all(row["tokens"] > 0 and row["accepted_length"] >= 1 for row in rows.values())
    assert report["results"]["plain"]["all"]["accepted_length"] == 1.0
    assert not survivors(evaluation.pid)


def test_several_batch_sizes_and_temperatures(
    processes: Processes, trained: Path, prompts: Path, tmp_path: Path
) -> None:
    output = tmp_path / "eval.json"
    evaluation = evaluate(
        *(processes, trained, "--prompts", prompts, "--batch-sizes", "1,2", "--temperatures", "0,1"),
        *("--max-new-tokens", "10", "--output", output, "--jobs", "2", "--report", tmp_path / "pages"),
    )
    assert evaluation.wait_exit(timeout=120) == 0, evaluation.output
    assert "one process decodes" in evaluation.output and " decoded prompts=12/12" in evaluation.output
    assert "batch 2, greedy: Lossless" in evaluation.output
    report = json.loads(output.read_text())
    assert report["settings"]["loop"] == "caches of fixed size, no graphs"
    found = [(f["batch_size"], f["temperature"], f["lossless"]) for f in report["by_setting"]]
    assert found == [(1, 0, True), (2, 0, True), (1, 1, None), (2, 1, None)]
    for setting in report["by_setting"]:
        assert {source: row["prompts"] for source, row in setting["results"]["trained"].items()} == {
            "a": 2,
            "b": 1,
            "all": 3,
        }
    assert report["results"] == report["by_setting"][0]["results"]
    assert json.loads((tmp_path / "pages" / "eval.json").read_text()) == report
    assert (tmp_path / "pages" / "eval.html").read_text().count('class="draft"') > 0


def test_graphs_without_a_gpu_are_refused(processes: Processes, trained: Path, prompts: Path) -> None:
    evaluation = evaluate(processes, trained, "--prompts", prompts, "--graphs")
    assert evaluation.wait_exit(timeout=120) != 0
    assert "--graphs needs a CUDA device" in evaluation.output and "Traceback" not in evaluation.output


def test_another_target_is_refused_unless_it_is_meant(
    processes: Processes, trained: Path, prompts: Path, tmp_path: Path
) -> None:
    write_target(tmp_path / "other", seed=9)
    arguments = (
        "--prompts",
        prompts,
        "--num-prompts",
        "1",
        "--max-new-tokens",
        "8",
        "--target-model",
        tmp_path / "other",
    )
    refused = evaluate(processes, trained, *arguments)
    assert refused.wait_exit(timeout=120) == 8, refused.output
    assert "not the one that the drafter was trained for" in refused.output and "Traceback" not in refused.output
    meant = evaluate(processes, trained, *arguments, "--allow-other-target")
    assert meant.wait_exit(timeout=120) == 0, meant.output
    assert "Target not verified" in meant.output


@pytest.mark.parametrize(
    ("checkpoint", "prompts", "status", "words"),
    [
        ("nowhere", None, 11, "there is no checkpoint or run 'nowhere'; looked for nowhere, runs/nowhere, "),
        (".", None, 11, "holds no checkpoint"),
        ("{trained}", None, 2, "there are no prompts: the run has no eval.prompts"),
        ("{trained}", "nowhere.jsonl", 3, "nowhere.jsonl cannot be read"),
        ("{trained}", "nowhere.jsonl --output no/where.json", 3, "--output: there is no directory "),
    ],
)
def test_refused_before_torch_is_imported(
    trained: Path, tmp_path: Path, checkpoint: str, prompts: str | None, status: int, words: str
) -> None:
    code = "import sys\nfrom drafter_trainer.cli import main\nprint(main(sys.argv[1:]), 'torch' in sys.modules)"
    flags = ["--prompts", *prompts.split()] if prompts else []
    finished = subprocess.run(
        [sys.executable, "-P", "-c", code, "eval", checkpoint.format(trained=trained), *flags],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert finished.stdout.split() == [str(status), "False"], finished.stderr
    assert words in finished.stderr


def test_missing_prompts_are_refused(processes: Processes, trained: Path) -> None:
    evaluation = evaluate(processes, trained, "--prompts", "nowhere.jsonl")
    assert evaluation.wait_exit(timeout=120) == 3
    assert "nowhere.jsonl" in evaluation.output and "Traceback" not in evaluation.output


def test_the_definition_of_another_version_is_refused(trained: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "step-00000003"
    shutil.copytree(trained / "checkpoints" / "latest", checkpoint)
    _rewrite_state(checkpoint, {"future": 1})
    with pytest.raises(SlipstreamError, match="run definition in checkpoint") as caught:
        open_checkpoint(checkpoint)
    assert caught.value.reason is Reason.CHECKPOINT_INVALID


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left(how: signal.Signals, processes: Processes, trained: Path, tmp_path: Path) -> None:
    """`slipstream eval` starts the evaluation, and that its workers: all of them are gone."""
    many = tmp_path / "many.jsonl"
    many.write_text("".join(json.dumps({"id": f"p{i}", "prompt": f"number {i}?"}) + "\n" for i in range(4000)))
    flags = ("--device", "cpu", "--threads", "2", "--jobs", "2", "--max-new-tokens", "64")
    evaluation = processes.start("slipstream.cli", "eval", trained, "--prompts", many, *flags)
    evaluation.wait_for_line(r" decoding .*processes=2", timeout=60)
    assert len([command for command in survivors(evaluation.pid, seconds=0.0) if "spawn_main" in command]) == 2
    os.kill(evaluation.pid, how)
    assert evaluation.wait_exit(timeout=120) == {signal.SIGTERM: 143, signal.SIGKILL: -9}[how], evaluation.output
    assert not survivors(evaluation.pid, seconds=60.0)


def _rewrite_state(checkpoint: Path, spec: dict[str, int]) -> None:
    """As an orderly program of another version would have written it: checksums are right."""
    state = json.loads((checkpoint / "state.json").read_text())
    (checkpoint / "state.json").write_text(json.dumps(state | {"spec": spec}))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    size, checksum = file_checksum(checkpoint / "state.json")
    manifest["files"]["state.json"] = {"size": size, "crc32c": checksum}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
