"""What a recipe may ask of the learning itself, over a real target server: killed, resumed, bit-equal."""

from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.fakes.processes import Processes
from tests.fakes.training import Trainer, assert_same_run

# Another seed of the data is another stream: this one carries the last hidden state, that of other tests does not.
LENGTH = ("train.max_steps=60", "checkpoint.every_steps=7", "data.seed=77")
EVERYTHING = (
    "loss.objective={cross_entropy = 0.3, lk_hybrid = 1.0}",
    "loss.slot_weights=dpace",
    "optimizer.kind=muon",
    "optimizer.learning_rate=1e-3",
    "optimizer.schedule=wsd",
    "optimizer.ema_decay=0.9",
    "train.feature_noise=0.05",
)


@pytest.fixture(scope="module")
def undisturbed(tiny_recipe: Path, target_address: str, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """A run with everything, from start to end in one process."""
    processes = Processes()
    directory = tmp_path_factory.mktemp("undisturbed")
    run = Trainer(processes, tiny_recipe, directory, *LENGTH, *EVERYTHING, "name=everything")
    run.finish(target_address)
    processes.close()
    return run


def test_the_loss_falls_and_the_average_is_what_is_saved(undisturbed: Trainer) -> None:
    losses = [float(str(record["loss"])) for record in undisturbed.records()]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    latest = undisturbed.directory / "checkpoints" / "latest"
    state = safetensors.torch.load_file(latest / "optimizer.safetensors")
    for name, averaged in undisturbed.weights().items():
        assert state[f"master.{name}"].shape == averaged.shape
    assert not torch.equal(state["master.fc.weight"], undisturbed.weights()["fc.weight"])


def test_kill_and_resume_change_nothing(
    undisturbed: Trainer, tiny_recipe: Path, target_address: str, processes: Processes, tmp_path: Path
) -> None:
    run = Trainer(processes, tiny_recipe, tmp_path, *LENGTH, *EVERYTHING, "name=everything-killed")
    trainer = run.start(target_address)
    trainer.wait_for_line(r"^step (2[5-9])/")
    trainer.kill()
    run.finish(target_address)
    assert {record["incarnation"] for record in run.records()} == {1, 2}
    assert_same_run(run, undisturbed)
    saved, expected = (
        safetensors.torch.load_file(r.directory / "checkpoints" / "latest" / "optimizer.safetensors")
        for r in (run, undisturbed)
    )
    assert saved.keys() == expected.keys() and all(torch.equal(saved[key], expected[key]) for key in saved)
