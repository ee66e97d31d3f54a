"""Stops, kills and restarts change nothing of what is learned: every test ends bit-equal to an undisturbed run."""

import random
from pathlib import Path

import pytest

from tests.fakes.processes import Processes
from tests.fakes.training import Trainer, assert_same_run

# So many that no run ends before a busy machine has seen the line on which a test acts.
STEPS = 120
LENGTH = ("train.max_steps=120", "checkpoint.every_steps=7")


@pytest.fixture(scope="module")
def undisturbed(tiny_recipe: Path, target_address: str, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """The same run, from start to end in one process."""
    processes = Processes()
    run = Trainer(processes, tiny_recipe, tmp_path_factory.mktemp("undisturbed"), *LENGTH, "name=undisturbed")
    run.finish(target_address)
    processes.close()
    return run


def test_a_run_trains_to_its_end(undisturbed: Trainer) -> None:
    records = undisturbed.records()
    assert [record["step"] for record in records] == list(range(STEPS))
    assert [record["sequence_numbers"] for record in records] == [[step] for step in range(STEPS)]
    assert all(record["applied"] for record in records)
    assert records[-1]["tokens"] == STEPS * 128 and records[-1]["eta_seconds"] == 0.0
    losses = [float(str(record["loss"])) for record in records]
    assert sum(losses[-5:]) < sum(losses[:5]) - 1.0, "the loss did not fall"
    checkpoints = undisturbed.directory / "checkpoints"
    assert sorted(path.name for path in checkpoints.glob("step-*")) == ["step-00000119", "step-00000120"]
    assert (checkpoints / "latest").readlink() == Path("step-00000120")


def test_sigterm_saves_and_a_second_start_goes_on(
    undisturbed: Trainer, tiny_recipe: Path, target_address: str, processes: Processes, tmp_path: Path
) -> None:
    run = Trainer(processes, tiny_recipe, tmp_path, *LENGTH, "name=sigterm")
    first = run.start(target_address)
    first.wait_for_line(r"^step 10/")
    first.terminate()
    assert first.wait_exit() == 0
    assert "run the same command again" in first.output and "Traceback" not in first.output
    stopped_after = max(run.losses()) + 1
    assert 10 <= stopped_after < STEPS
    assert (tmp_path / "checkpoints" / "latest").readlink() == Path(f"step-{stopped_after:08d}")

    second = run.finish(target_address)
    assert f"next_step={stopped_after}" in second.output
    assert len(run.records()) == STEPS, "a step was trained twice although nothing was lost"
    assert_same_run(run, undisturbed)


def test_kill_of_the_trainer_at_a_random_step(
    undisturbed: Trainer, tiny_recipe: Path, target_address: str, processes: Processes, tmp_path: Path
) -> None:
    run = Trainer(processes, tiny_recipe, tmp_path, *LENGTH, "name=killed")
    for kills in range(2):
        step = random.randint(3 + 20 * kills, 20 + 20 * kills)
        process = run.start(target_address)
        process.wait_for_line(rf"^step ({step}|{step + 1}|{step + 2})/")
        process.kill()
        print(f"killed at step {step} or soon after")  # noqa: T201 - shown when the test fails
    run.finish(target_address)
    assert {record["incarnation"] for record in run.records()} == {1, 2, 3}
    assert_same_run(run, undisturbed)


def test_kill_while_checkpoints_are_written(
    undisturbed: Trainer, tiny_recipe: Path, target_address: str, processes: Processes, tmp_path: Path
) -> None:
    """One after every step: whenever the process dies, one is being copied, written, or put into its place."""
    settings = ("train.max_steps=120", "checkpoint.every_steps=1")
    run = Trainer(processes, tiny_recipe, tmp_path, *settings, "name=killed-while-saving")
    for kills in range(2):
        step = random.randint(3 + 20 * kills, 20 + 20 * kills)
        process = run.start(target_address)
        process.wait_for_line(rf"^step ({step}|{step + 1}|{step + 2})/")
        process.kill()
        print(f"killed at step {step} or soon after")  # noqa: T201 - shown when the test fails
    run.finish(target_address)
    assert not list((tmp_path / "checkpoints").glob(".*")), "a leftover of a killed trainer"
    assert_same_run(run, undisturbed)


def test_kill_of_the_target_server(
    undisturbed: Trainer, tiny_recipe: Path, processes: Processes, tmp_path: Path
) -> None:
    server_flags = (tiny_recipe, "--ledger", tmp_path / "ledger.sqlite", "--probe-bytes", "1MiB")
    server, address = processes.start_target_server(*server_flags)
    run = Trainer(processes, tiny_recipe, tmp_path / "run", *LENGTH, "name=orphan")
    trainer = run.start(address)
    trainer.wait_for_line(r"^step 15/")
    server.kill()
    trainer.wait_for_line("waiting_for_target.*TARGET_UNREACHABLE")
    processes.start_target_server(*server_flags, port=int(address.rpartition(":")[2]))
    assert trainer.wait_exit(timeout=60) == 0, trainer.output
    assert "rejoined incarnation=2" in trainer.output and "run_finished" in trainer.output
    assert len(run.records()) == STEPS, "the trainer itself lost nothing"
    assert_same_run(run, undisturbed)


def test_transports_and_prefetch_do_not_change_what_is_learned(
    undisturbed: Trainer, tiny_recipe: Path, target_address: str, processes: Processes, tmp_path: Path
) -> None:
    run = Trainer(
        processes, tiny_recipe, tmp_path, *LENGTH, "name=over-grpc", "stream.transport=grpc", "stream.prefetch_packs=7"
    )
    process = run.finish(target_address)
    assert "transport_chosen transport=grpc" in process.output
    assert_same_run(run, undisturbed)


def test_sigterm_while_the_target_is_away(
    undisturbed: Trainer, tiny_recipe: Path, target_address: str, processes: Processes, tmp_path: Path
) -> None:
    server, address = processes.start_target_server(
        tiny_recipe, "--ledger", tmp_path / "ledger.sqlite", "--probe-bytes", "1MiB"
    )
    run = Trainer(processes, tiny_recipe, tmp_path / "run", *LENGTH, "name=left-alone")
    trainer = run.start(address)
    trainer.wait_for_line(r"^step 15/")
    server.kill()
    trainer.wait_for_line("waiting_for_target.*TARGET_UNREACHABLE")
    trainer.terminate()
    assert trainer.wait_exit() == 0, trainer.output
    assert "run the same command again" in trainer.output and "Traceback" not in trainer.output
    # Every step that was trained is in the checkpoint, so the run can go on elsewhere: on a server that never saw it.
    assert (run.directory / "checkpoints" / "latest").readlink() == Path(f"step-{max(run.losses()) + 1:08d}")
    run.finish(target_address)
    assert len(run.records()) == STEPS
    assert_same_run(run, undisturbed)
