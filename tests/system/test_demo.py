"""`slipstream demo` as a process with real children: a summary at the end, nothing left behind, nothing deleted."""

import json
from pathlib import Path

import pytest

from slipstream.cli.commands.demo import STACK
from slipstream.launcher.liveness import marked, open_handles
from tests.fakes.process_group import survivors
from tests.fakes.processes import ManagedProcess, Processes
from tests.fakes.tiny_run import write_tiny_run

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def demo_recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny run, with prompts."""
    recipe = write_tiny_run(tmp_path_factory.mktemp("demo-recipe"))
    prompts = [{"id": f"p{i}", "prompt": f"the river town, number {i}?"} for i in range(4)]
    (recipe.parent / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    recipe.write_text(recipe.read_text() + '[eval]\nprompts = "prompts.jsonl"\nmax_new_tokens = 12\n')
    return recipe


def start_demo(processes: Processes, recipe: Path, directory: Path, *settings: str) -> ManagedProcess:
    overrides = [word for setting in settings for word in ("--set", setting)]
    return processes.start(
        *("slipstream.cli", "demo", "--recipe", recipe, "--model", recipe.parent / "target"),
        *("--directory", directory, *overrides),
        env=NO_GPU,
    )


def test_from_nothing_to_the_summary(processes: Processes, demo_recipe: Path, tmp_path: Path) -> None:
    demo = start_demo(processes, demo_recipe, tmp_path / "demo", "train.max_steps=8")
    assert demo.wait_exit(timeout=120) == 0, demo.output
    assert "accepted length, bonus included" in demo.output and "Target verified" in demo.output
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    named = {"model", "device", "tokens", "steps", "seconds", "loss", "accepted_length"}
    assert set(summary) == named | {"objective", "lossless", "dashboard"}
    assert f"dashboard: {summary['dashboard']}" in demo.output
    assert (summary["model"], summary["steps"], summary["tokens"]) == ("target", 8, 8 * 128)
    assert summary["lossless"] is True and summary["device"].startswith("CPU")
    assert set(summary["loss"]) == {"first", "last"} and all(loss > 0 for loss in summary["loss"].values())
    assert set(summary["accepted_length"]) == {"before", "after"}
    assert all(length >= 1 for length in summary["accepted_length"].values())
    assert not survivors(demo.pid) and not marked(tmp_path / "demo" / STACK)


def test_a_second_demo_is_refused_and_sigterm_leaves_no_process(
    processes: Processes, demo_recipe: Path, tmp_path: Path
) -> None:
    demo = start_demo(processes, demo_recipe, tmp_path / "demo", "train.max_steps=1000000")
    demo.wait_for_line(r"^step [1-9]\d*/", timeout=120)
    home = tmp_path / "demo" / STACK
    assert len(marked(home)) >= 4, "control API, target server, agent, training process"
    second = start_demo(processes, demo_recipe, tmp_path / "demo")
    assert second.wait_exit(timeout=60) == 18
    assert "is up in" in second.output and "slipstream down --home" in second.output
    demo.terminate()
    assert demo.wait_exit(timeout=60) == 143, demo.output
    assert not survivors(demo.pid) and not marked(home)
    assert "Traceback" not in demo.output


def test_a_killed_demo_takes_its_stack_with_it(processes: Processes, demo_recipe: Path, tmp_path: Path) -> None:
    demo = start_demo(processes, demo_recipe, tmp_path / "demo", "train.max_steps=1000000")
    demo.wait_for_line("^target: ready", timeout=120)
    home = tmp_path / "demo" / STACK
    handles = open_handles(marked(home))
    assert handles
    demo.kill()
    for handle in handles:
        assert handle.has_ended(60.0)
        handle.close()
    assert not marked(home)


def test_a_foreign_directory_is_refused(processes: Processes, demo_recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    demo = start_demo(processes, demo_recipe, tmp_path)
    assert demo.wait_exit() == 3
    assert "no earlier demo" in demo.output and "Traceback" not in demo.output
    assert {entry.name for entry in tmp_path.iterdir()} == {"logs", "notes.txt"}
