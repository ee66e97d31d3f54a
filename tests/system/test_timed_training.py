"""What the benchmarks of whole trainings rest on: a real run by the clock behind a gate, then decoded with."""

import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks.accepted_length import AcceptedLengths, Measured
from benchmarks.served_training import (
    InterruptedTrainingError,
    Place,
    TrainerProcess,
    TrainingFailedError,
    checkpoints,
    step_records,
    target_server,
)

ENDLESS = ("train.max_steps=1000000", "checkpoint.keep=100")


@pytest.fixture(autouse=True)
def _children_import_what_we_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))


def test_training_waits_at_its_gate_ends_with_its_time_and_can_be_decoded_with(
    tiny_recipe: Path, tmp_path: Path
) -> None:
    model = str(tiny_recipe.parent / "target")
    place = Place(model, tiny_recipe, "cpu", 0)
    with target_server(place, tmp_path / "server", tiny_recipe.parent) as server:
        with TrainerProcess(place, server, tmp_path / "run", ENDLESS, seconds=1.0) as trainer:
            trainer.wait_until_ready()
            assert not (trainer.run_directory / "metrics.jsonl").exists() or not step_records(trainer.run_directory)
            trainer.begin()
            done = trainer.wait()
        records = step_records(trainer.run_directory)
        assert done["steps"] == len(records) >= 2
        # The last step began when the time was over, wherever the recipe would have been.
        assert records[-1]["learning_rate"] < 1e-8
        saved = checkpoints(trainer.run_directory)
        assert [directory.name for _, directory in saved][-1] == f"step-{len(records):08d}"
        assert saved[-1][0] == pytest.approx(done["seconds"])

        with (
            TrainerProcess(place, server, tmp_path / "broken", ("optimizer.learning_rate=-1",), seconds=1.0) as broken,
            pytest.raises(TrainingFailedError, match="does not define a run"),
        ):
            broken.wait_until_ready()

        with TrainerProcess(place, server, tmp_path / "gated", ENDLESS, seconds=1.0) as gated:
            gated.wait_until_ready()
        assert gated._process.returncode == 0, "one that still waits at its gate ends when it is told to"
    with pytest.raises(TrainingFailedError, match="target server ended"):
        server.check()

    prompts = tmp_path / "prompts.jsonl"
    lines = [{"id": f"{source}{n}", "source": source, "prompt": "why " * n} for source in "ab" for n in (1, 2)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--model", model, "--prompts", str(prompts), "--max-new-tokens", "8", "--batch", "3"]
    options += ["--device", "cpu", "--dtype", "float32"]
    with AcceptedLengths(options, tmp_path / "worker.log", {"OMP_NUM_THREADS": "1"}, graphs=False) as lengths:
        answer = lengths.measure(saved[-1][1])
    assert answer["outputs_that_differ"] == 0
    measured = Measured.of(answer)
    assert measured.sources == ["a", "b", "all"]
    assert all(len(counts) == 2 for counts in measured.rounds.values())
    assert measured.accepted_length("all") >= 1.0


def test_a_benchmark_that_is_told_to_end_waits_for_nothing(tiny_recipe: Path, tmp_path: Path) -> None:
    place = Place("nowhere", tiny_recipe, "cpu", 0, stopped=lambda: True)
    with pytest.raises(InterruptedTrainingError), target_server(place, tmp_path, tiny_recipe.parent):
        raise AssertionError("it must not come here")
