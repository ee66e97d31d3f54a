"""Real processes: a run is exported, measured, and trained on; drafters of others are trained on."""

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.fakes.processes import Processes
from tests.fakes.training import Trainer

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "formats"


@pytest.fixture(scope="module")
def trained(tiny_recipe: Path, target_address: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of three steps, with checkpoints of the second and the third."""
    started = Processes()
    settings = ("name=origin", "train.max_steps=3", "checkpoint.every_steps=2")
    run = Trainer(started, tiny_recipe, tmp_path_factory.mktemp("run") / "run", *settings)
    run.finish(target_address)
    started.close()
    return run.directory


def first_loss(processes: Processes, recipe: Path, address: str, directory: Path, *settings: str) -> object:
    run = Trainer(processes, recipe, directory, f"name={directory.name}", "train.max_steps=2", *settings)
    ended = run.finish(address, timeout=90)
    # Before anything is compiled it is known to fit; then it is read.
    said = re.findall(" (first_drafter_fits|first_weights) directory=", ended.output)
    assert said == ["first_drafter_fits", "first_weights"], ended.output
    return run.losses()[0]


def accepted(processes: Processes, drafter: Path, directory: Path) -> list[object]:
    """What an evaluation measures of a checkpoint or an export, but for the time."""
    prompts, report = directory / "prompts.jsonl", directory / "report.json"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("why?", "the river")))
    flags = ("--device", "cpu", "--threads", "1", "--max-new-tokens", "12", "--prompts", prompts, "--output", report)
    measured = processes.start("drafter_trainer", "eval", drafter, *flags)
    assert measured.wait_exit(timeout=90) == 0, measured.output
    assert "Lossless" in measured.output and "Target verified" in measured.output
    row = json.loads(report.read_text())["results"]["trained"]["all"]
    return [row[key] for key in ("rounds", "tokens", "accepted_length", "acceptance_by_position")]


@pytest.mark.parametrize("name", ["vllm", "zlab"])
def test_export_measure_and_train_on(
    name: str, processes: Processes, trained: Path, tiny_recipe: Path, target_address: str, tmp_path: Path
) -> None:
    output = tmp_path / "exported"
    flags = ("--to", name, "--output", output, "--threads", "1")
    exported = processes.start("slipstream.cli", "checkpoint", "export", f"{trained}@3", *flags)
    assert exported.wait_exit(timeout=120) == 0, exported.output
    # Whoever waits sees what for.
    told = (
        "exporting",
        "comparing_target",
        "loading_target",
        "writing",
        "self_test_decodes prompt=4/4",
        "self_test_passed",
    )
    assert re.findall("|".join(told), exported.output) == list(told)
    assert f"next: how to serve it is in {output}/README.md" in exported.output
    again = processes.start("slipstream.cli", "checkpoint", "export", trained, *flags)
    assert again.wait_exit(timeout=60) == 3, again.output
    assert "exists already" in again.output and "--force" in again.output

    assert accepted(processes, output, tmp_path) == accepted(processes, trained, tmp_path)

    # A run is named as one that lies beside the new one.
    places = {str(output): tmp_path / name, f"{trained.name}@3": trained.parent / name}
    losses = {
        first_loss(processes, tiny_recipe, target_address, place, f"drafter.init_from={source}")
        for source, place in places.items()
    }
    assert len(losses) == 1, "an export and its checkpoint begin with the same weights, bit for bit"
    exported_from, checkpoint = (json.loads((place / "first_drafter.json").read_text()) for place in places.values())
    assert Path(checkpoint["directory"]) == trained / "checkpoints" / "step-00000003"
    same = ("run", "step", "target_fingerprint")
    assert [exported_from[key] for key in same] == [checkpoint[key] for key in same] and checkpoint["run"] == "origin"


def test_a_run_that_is_killed_before_its_first_checkpoint_begins_with_the_same_drafter_again(
    processes: Processes, trained: Path, tiny_recipe: Path, target_address: str, tmp_path: Path
) -> None:
    """Although its name means a newer one meanwhile."""
    shutil.copytree(trained, tmp_path / "origin", symlinks=True)
    latest = tmp_path / "origin" / "checkpoints" / "latest"
    latest.unlink()
    latest.symlink_to("step-00000002")
    long = ("train.max_steps=1000000", "checkpoint.every_steps=1000000")
    run = Trainer(processes, tiny_recipe, tmp_path / "killed", "name=killed", "drafter.init_from=origin", *long)
    for _ in range(2):
        process = run.start(target_address)
        process.wait_for_line(r"^step 3/")
        process.kill()
        assert not list((run.directory / "checkpoints").glob("step-*"))
        latest.unlink()
        latest.symlink_to("step-00000003")
    assert Path(json.loads((run.directory / "first_drafter.json").read_text())["directory"]).name == "step-00000002"
    expected = first_loss(processes, tiny_recipe, target_address, tmp_path / "named", "drafter.init_from=origin@2")
    assert run.losses()[0] == expected


@pytest.mark.parametrize("name", ["speculators", "specforge"])
def test_train_on_from_what_others_wrote(
    name: str, processes: Processes, tiny_recipe: Path, target_address: str, tmp_path: Path
) -> None:
    settings = (f"drafter.init_from={GOLDEN / name}", "drafter.intermediate_size=96")
    assert first_loss(processes, tiny_recipe, target_address, tmp_path / name, *settings)


def test_a_drafter_of_other_sizes_is_refused_in_words(
    processes: Processes, tiny_recipe: Path, target_address: str, tmp_path: Path
) -> None:
    run = Trainer(processes, tiny_recipe, tmp_path / "run", "name=other", f"drafter.init_from={GOLDEN / 'speculators'}")
    process = run.start(target_address)
    assert process.wait_exit(timeout=90) == 2, process.output
    assert "intermediate_size 96 (expected 128)" in process.output
    assert "Set in [drafter]: intermediate_size = 96." in process.output and "Traceback" not in process.output
