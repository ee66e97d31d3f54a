"""`best` points at the checkpoint with the largest held-out estimate, whatever was killed, pruned or rolled back."""

from dataclasses import replace
from pathlib import Path

import pytest

from drafter_trainer.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from drafter_trainer.checkpoint_state import HeldoutEstimate, best_checkpoint, read_state
from drafter_trainer.run_directory import RunDirectory
from tests.unit.trainer_runtime.test_checkpoint import make_checkpoint


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.claim(1, "trainers/a")
    return directory


def measured(step: int, length: float | None, *, answers: str = "a", incarnation: int = 1) -> Checkpoint:
    """A checkpoint with this estimate; None: one that was saved out of turn."""
    checkpoint = make_checkpoint(step, incarnation=incarnation)
    estimate = length and HeldoutEstimate(accepted_length=length, by_source={"news": length}, answers=answers)
    return replace(checkpoint, state=checkpoint.state.model_copy(update={"heldout": estimate or None}))


def best_step(run: RunDirectory) -> int | None:
    best = best_checkpoint(run.checkpoints)
    return None if best is None else read_state(best).cursor.next_step


def steps(run: RunDirectory) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in run.checkpoints.glob("step-*"))


def test_the_best_stays_however_few_are_kept(run: RunDirectory) -> None:
    save_checkpoint(run, measured(10, None), keep=2)
    assert best_step(run) is None and not (run.checkpoints / "best").is_symlink()
    for step, length in ((20, 1.5), (30, 1.4), (40, None), (50, 1.3), (60, 1.5)):
        save_checkpoint(run, measured(step, length), keep=2)
        assert best_step(run) == 20
    assert steps(run) == [20, 50, 60]
    assert (run.checkpoints / "best").readlink() == Path("step-00000020")
    found = load_checkpoint(run.checkpoints / "best")
    assert found.state.heldout is not None and found.state.heldout.accepted_length == 1.5
    save_checkpoint(run, measured(70, 1.6), keep=1)
    assert (best_step(run), steps(run)) == (70, [70])


def test_a_save_mends_what_a_killed_trainer_left(run: RunDirectory) -> None:
    save_checkpoint(run, measured(10, 1.2), keep=3)
    save_checkpoint(run, measured(20, 1.9), keep=3)
    # Killed between two renames: `best` still names the one before, or nothing that is there.
    for leftover in ("step-00000010", "step-00000099"):
        (run.checkpoints / "best").unlink()
        (run.checkpoints / "best").symlink_to(leftover)
        save_checkpoint(run, measured(30, 1.3), keep=3)
        assert best_step(run) == 20


def test_a_rolled_back_run_replaces_its_best(run: RunDirectory) -> None:
    save_checkpoint(run, measured(10, 1.2), keep=3)
    save_checkpoint(run, measured(20, 1.9), keep=3)
    run.claim(2, "trainers/b")
    save_checkpoint(run, measured(20, 1.1, incarnation=2), keep=3)
    assert best_step(run) == 10
    save_checkpoint(run, measured(20, None, incarnation=2), keep=3)
    assert best_step(run) == 10


def test_estimates_on_other_answers_do_not_compare(run: RunDirectory) -> None:
    save_checkpoint(run, measured(10, 2.5), keep=1)
    save_checkpoint(run, measured(20, 1.2, answers="b"), keep=1)
    assert (best_step(run), steps(run)) == (20, [20])


def test_a_damaged_checkpoint_is_not_the_best(run: RunDirectory) -> None:
    damaged = save_checkpoint(run, measured(10, 2.5), keep=3)
    (damaged / "state.json").write_text("{}")
    save_checkpoint(run, measured(20, 1.2), keep=3)
    assert best_step(run) == 20
