"""Who may train what: two trainers on one run, two runs on one target, and what is refused in words."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.hidden_states.v1 import hidden_state_service_pb2 as pb
from slipstream.hidden_states.v1 import stream_admin_service_pb2 as admin_pb
from slipstream.run_spec.load import canonical_json
from slipstream.run_spec.spec import RunSpec
from slipstream.wire.channel import TargetClient
from tests.fakes.processes import Processes
from tests.fakes.tiny_run import write_target
from tests.fakes.training import Trainer

ENDLESS = ("train.max_steps=100000", "checkpoint.every_steps=5")


def test_of_two_trainers_the_older_stops_and_writes_nothing(
    tiny_recipe: Path, target_address: str, processes: Processes, tmp_path: Path
) -> None:
    run = Trainer(processes, tiny_recipe, tmp_path, *ENDLESS, "name=claimed-twice")
    older = run.start(target_address)
    older.wait_for_line(r"^step 8/")
    newer = run.start(target_address)
    newer.wait_for_line(r"^step \d+/")
    assert older.wait_exit() == 7, older.output
    assert "has taken over" in older.output or "taken the run over" in older.output, older.output
    assert "Traceback" not in older.output
    newer.wait_for_line("checkpoint_saved")
    newer.terminate()
    assert newer.wait_exit() == 0, newer.output

    incarnations = [record["incarnation"] for record in run.records()]
    assert incarnations == sorted(incarnations), "the older trainer wrote after the newer one had begun"
    assert set(incarnations) == {1, 2}
    assert json.loads((tmp_path / "owner.json").read_text())["incarnation"] == 2
    newest = json.loads((tmp_path / "checkpoints" / "latest" / "state.json").read_text())
    assert newest["incarnation"] == 2
    assert newest["cursor"]["next_step"] == max(run.losses()) + 1


def test_two_runs_as_a_group_compute_every_pack_once(tiny_recipe: Path, processes: Processes, tmp_path: Path) -> None:
    _, address = processes.start_target_server(
        tiny_recipe, "--ledger", tmp_path / "ledger.sqlite", "--probe-bytes", "1MiB"
    )
    group = ("stream.start=group", "stream.group=sweep", "stream.group_size=2", "train.max_steps=40")
    first = Trainer(processes, tiny_recipe, tmp_path / "first", *group, "name=first")
    second = Trainer(
        processes,
        *(tiny_recipe, tmp_path / "second", *group, "name=second", "train.seed=7", "optimizer.learning_rate=1e-3"),
    )
    waiting = first.start(address)
    waiting.wait_for_line("waiting_for_group")
    assert not (first.directory / "metrics.jsonl").read_text(), "a member was served before the group was complete"
    second.finish(address)
    assert waiting.wait_exit() == 0, waiting.output

    assert first.losses().keys() == second.losses().keys() == set(range(40))
    assert first.losses() != second.losses()
    stream = json.loads((first.directory / "checkpoints" / "latest" / "state.json").read_text())["stream"]
    with TargetClient(address) as client:
        stats = client.get_stream_stats(admin_pb.GetStreamStatsRequest(stream=stream))
    # The server does not know where a run ends: two packs more may have been computed ahead.
    assert stats.packs_computed in (40, 41, 42) and stats.packs_recomputed == 0
    assert {entry.subscription: entry.packs_committed for entry in stats.subscriptions} == {
        "subscriptions/first": 40,
        "subscriptions/second": 40,
    }


def test_packs_per_step_makes_fewer_steps_of_the_same_packs(
    tiny_recipe: Path, target_address: str, processes: Processes, tmp_path: Path
) -> None:
    run = Trainer(processes, tiny_recipe, tmp_path, "name=three-packs", "train.packs_per_step=3", "train.max_steps=6")
    run.finish(target_address)
    assert [record["sequence_numbers"] for record in run.records()] == [
        [3 * step, 3 * step + 1, 3 * step + 2] for step in range(6)
    ]
    assert run.records()[-1]["tokens"] == 6 * 3 * 128


def test_a_run_of_one_epoch_ends_with_its_last_whole_step(
    tiny_recipe: Path, target_address: str, processes: Processes, tmp_path: Path
) -> None:
    settings = ("train.epochs=1", "train.max_steps=100000", "train.packs_per_step=2")
    run = Trainer(processes, tiny_recipe, tmp_path, "name=one-epoch", *settings)
    run.finish(target_address)
    state = json.loads((tmp_path / "checkpoints" / "latest" / "state.json").read_text())
    # The server's own count: subscribing again is idempotent and says how long the stream is.
    request = pb.OpenSubscriptionRequest(
        run="runs/one-epoch",
        data_spec_json=canonical_json(RunSpec.model_validate(state["spec"]).data),
        layer_ids=[1, 2],
        packs_per_step=2,
        start_position=pb.START_POSITION_BEGINNING,
        max_epochs=1,
    )
    with TargetClient(target_address) as client:
        total_packs = client.open_subscription(request).total_packs
    assert total_packs > 60
    assert len(run.records()) == total_packs // 2 == state["total_steps"]


def test_an_unreachable_target_is_waited_for_and_a_stop_ends_the_wait(
    tiny_recipe: Path, processes: Processes, tmp_path: Path
) -> None:
    process = Trainer(processes, tiny_recipe, tmp_path, "name=lonely").start("127.0.0.1:9")
    process.wait_for_line("waiting_for_target.*TARGET_UNREACHABLE")
    process.terminate()
    assert process.wait_exit() == 0, process.output
    assert not (tmp_path / "metrics.jsonl").exists()


def test_another_target_under_a_run_is_refused(
    tiny_recipe: Path, target_address: str, processes: Processes, tmp_path: Path
) -> None:
    run = Trainer(processes, tiny_recipe, tmp_path / "run", "name=loyal", "train.max_steps=120")
    first = run.start(target_address)
    first.wait_for_line("checkpoint_saved step=5")
    first.kill()
    write_target(tmp_path / "other", seed=1)
    _, other = processes.start_target_server(
        tiny_recipe, "--model", tmp_path / "other", "--ledger", tmp_path / "l.sqlite", "--probe-bytes", "1MiB"
    )
    before = (run.directory / "metrics.jsonl").read_bytes()
    refused = run.start(other)
    assert refused.wait_exit() == 8
    assert "The target changed under run loyal" in refused.output and "remedy:" in refused.output
    assert "Traceback" not in refused.output
    assert (run.directory / "metrics.jsonl").read_bytes() == before
    run.finish(target_address)


def test_a_used_directory_and_another_definition_are_refused(
    tiny_recipe: Path, target_address: str, processes: Processes, tmp_path: Path
) -> None:
    run = Trainer(processes, tiny_recipe, tmp_path, "name=settled", "train.max_steps=3")
    run.finish(target_address)
    again = run.start(target_address, "--resume", "never")
    assert again.wait_exit() == 2
    assert "already holds a run" in again.output and "--run-dir" in again.output

    changed = run.start(target_address, "--set", "optimizer.learning_rate=5e-4", "--set", "train.max_steps=9")
    assert changed.wait_exit() == 2
    assert "optimizer.learning_rate: 0.003 in the checkpoint, 0.0005 now" in changed.output
    assert "train.max_steps: 3 in the checkpoint, 9 now" in changed.output

    # What does not change what is learned may change: the run is complete and says so.
    finished = run.finish(target_address, "--set", "checkpoint.keep=1", "--set", "stream.transport=grpc")
    assert "step=3/3" in finished.output


def test_a_damaged_checkpoint_is_named(
    tiny_recipe: Path, target_address: str, processes: Processes, tmp_path: Path
) -> None:
    run = Trainer(processes, tiny_recipe, tmp_path, "name=damaged", "train.max_steps=8")
    run.finish(target_address)
    file = tmp_path / "checkpoints" / "latest" / "optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    refused = run.start(target_address)
    assert refused.wait_exit() == 11
    assert "optimizer.safetensors" in refused.output and "step-00000005" in refused.output
    assert "Traceback" not in refused.output


def test_a_run_whose_loss_is_not_finite_ends_in_words(
    tiny_recipe: Path, target_address: str, processes: Processes, tmp_path: Path
) -> None:
    explosive = ("optimizer.learning_rate=1e38", "optimizer.warmup_fraction=0", "checkpoint.every_steps=1")
    run = Trainer(processes, tiny_recipe, tmp_path, "name=explosive", *explosive)
    process = run.start(target_address)
    assert process.wait_exit() == 9, process.output
    assert "3 steps in a row" in process.output and "step_not_applied step=1" in process.output
    assert "packs=1 " in process.output, "the pack is not named"
    records = run.records()
    assert [record["applied"] for record in records] == [True, False, False, False]
    assert [record["loss_hex"] for record in records[1:]] == ["nan"] * 3
    kept = json.loads((tmp_path / "checkpoints" / "latest" / "state.json").read_text())
    assert kept["loop"]["not_finite_in_row"] == 2 and kept["loop"]["not_finite_steps"] == 2

    again = run.start(target_address)
    assert again.wait_exit() == 9, again.output
    assert f"The last good checkpoint is kept: {tmp_path / 'checkpoints' / 'step-00000003'}" in again.output


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one checkpoint of the tiny run (0.6 MB), not for two."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"mounting a small tmpfs is not permitted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_stops_the_run_and_keeps_the_previous_checkpoint(
    tiny_recipe: Path, target_address: str, processes: Processes, small_disk: Path, tmp_path: Path
) -> None:
    run = Trainer(processes, tiny_recipe, small_disk / "run", "name=crammed", "train.max_steps=12")
    stopped = run.start(target_address)
    assert stopped.wait_exit() == 5, stopped.output
    assert "The disk is full" in stopped.output and "Traceback" not in stopped.output
    checkpoints = run.directory / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step-00000005"]

    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    resumed = run.finish(target_address)
    assert "next_step=5" in resumed.output
    undisturbed = Trainer(processes, tiny_recipe, tmp_path / "roomy", "name=roomy", "train.max_steps=12")
    undisturbed.finish(target_address)
    assert run.losses() == undisturbed.losses()
