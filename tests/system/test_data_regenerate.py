"""`slipstream data regenerate`: a real target answers, is killed, and goes on to the same file."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.run_spec.spec import TargetSpec
from slipstream.target_loading import load_causal_lm
from tests.fakes.processes import ManagedProcess, Processes
from tests.fakes.served_model import write_tiny_target

PROMPTS = 100
FLAGS = ("--max-new-tokens", "24", "--batch", "2", "--device", "cpu", "--threads", "1", "--set", "target.dtype=float32")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("target")
    write_tiny_target(directory)
    return directory


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines: list[dict[str, Any]] = [
        {"id": f"p{number}", "prompt": "why " * (number % 7 + 1)} for number in range(PROMPTS)
    ]
    lines[1] = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "not looked at"}]}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + "oops\n")
    return path


def start(processes: Processes, prompts: Path, target: Path, to: Path, *flags: str) -> ManagedProcess:
    command = ("data", "regenerate", prompts, "--model", target, "--to", to, *FLAGS, *flags)
    return processes.start("slipstream.cli", *command)


def finish(process: ManagedProcess, status: int = 0) -> str:
    assert process.wait_exit(timeout=150) == status, process.output
    assert "Traceback" not in process.output
    return process.output


def test_killed_and_resumed_it_writes_the_same_answers(
    processes: Processes, prompts: Path, target: Path, tmp_path: Path
) -> None:
    drawn = ("--temperature", "0.8", "--top-p", "0.9", "--seed", "5")
    whole = start(processes, prompts, target, tmp_path / "whole.jsonl", *drawn)
    output = finish(whole)
    assert f"{PROMPTS + 1} prompts read: {PROMPTS} answered" in output
    assert "dropped 1: the line is not valid JSON (prompts.jsonl:101)" in output
    # Not through `slipstream`, which would survive its child: the process that answers is killed.
    flags = [prompts, "--model", target, "--to", tmp_path / "broken.jsonl", *FLAGS, *drawn]
    broken = processes.start("target_server", "regenerate", *flags, "--report", tmp_path / "unused.json")
    broken.wait_for_line("answered", timeout=90)
    broken.kill()
    with (tmp_path / "broken.jsonl").open("ab") as file:
        file.write(b'{"id": "p16", "input_ids": [1, 2')  # killed in the middle of a row
    finish(start(processes, prompts, target, tmp_path / "broken.jsonl", *drawn))
    assert (tmp_path / "broken.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    other = finish(start(processes, prompts, target, tmp_path / "whole.jsonl", "--seed", "6"), status=3)
    assert "was begun with other settings: seed, temperature, top_p" in other
    settings = json.loads((tmp_path / "whole.jsonl.settings.json").read_text())
    assert (settings["temperature"], settings["seed"], len(settings["target_fingerprint"])) == (0.8, 5, 64)


def test_greedy_answers_are_the_targets_own_tokens(
    processes: Processes, prompts: Path, target: Path, tmp_path: Path
) -> None:
    answers = tmp_path / "deep" / "answers.jsonl"
    finish(start(processes, prompts, target, answers))
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [row["id"] for row in rows] == ["p0", "prompts.jsonl:2", *(f"p{number}" for number in range(2, PROMPTS))]
    loaded = load_causal_lm(TargetSpec(model=str(target), dtype="float32"), "cpu")
    for row in rows[:6]:
        prompt = row["input_ids"][: row["loss_mask"].index(1)]
        text = loaded.tokenizer.decode(prompt)
        assert text.endswith("<|im_start|>assistant\n") and text.startswith("<|im_start|>user\n")
        alone = loaded.model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=24)[0].tolist()
        assert row["input_ids"] == alone
        assert sum(row["loss_mask"]) == len(alone) - len(prompt)
        assert row["finished"] == (alone[-1] == loaded.tokenizer.eos_token_id)
    inspected = processes.start("slipstream.cli", "data", "inspect", answers, "--model", target)
    assert f"{PROMPTS} used for train" in finish(inspected)


def test_what_is_refused(processes: Processes, prompts: Path, target: Path, tmp_path: Path) -> None:
    assert "No text is drawn" in finish(start(processes, prompts, target, tmp_path / "a", "--top-p", "2"), status=2)
    too_long = start(processes, prompts, target, tmp_path / "b", "--max-new-tokens", "1000000")
    assert "leave none for a prompt" in finish(too_long, status=2)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("{}\n")
    assert "no usable prompt in 1 records" in finish(start(processes, empty, target, tmp_path / "c"), status=3)
