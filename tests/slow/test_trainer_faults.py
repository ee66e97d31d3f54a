"""Orders of events that could lose a checkpoint, train a step twice, or commit one that was not trained.

Whole runs in this process. A trainer that "is killed" here ends by an exception that nothing catches, at one exact
point, and neither saves nor commits anything after it.
"""

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest

from drafter_trainer import checkpoint as checkpoint_module
from drafter_trainer import checkpoint_writer, start
from drafter_trainer.batch_source import BatchSource
from drafter_trainer.checkpoint import load_checkpoint
from drafter_trainer.checkpoint_state import newest_checkpoint, read_state
from drafter_trainer.metrics import MetricsFile, StepRecord
from drafter_trainer.starting_weights import SavedState
from drafter_trainer.wait_notice import WaitNotice
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from target_server.ledger_store import LedgerStore
from target_server.lineage import lineage_report
from tests.fakes.ledger_desk import full_disk, locked_by_another_program
from tests.fakes.live_run import LiveRun, go_away, live_target, stop_here
from tests.fakes.tiny_run import write_tiny_run
from tests.fakes.training import assert_same_run

LENGTH = ("train.max_steps=24", "checkpoint.every_steps=5", "checkpoint.keep=9")
_DEADLINE = 30.0


class Killed(BaseException):
    """In place of SIGKILL."""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_run(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ledger")


@pytest.fixture(scope="module")
def address(recipe: Path, ledger: Path) -> Iterator[str]:
    with live_target(recipe, ledger) as server:
        yield server.address


@pytest.fixture(scope="module")
def undisturbed(recipe: Path, address: str, tmp_path_factory: pytest.TempPathFactory) -> LiveRun:
    run = LiveRun(recipe, address, tmp_path_factory.mktemp("undisturbed"), *LENGTH, "name=undisturbed")
    run.train()
    return run


def newest_step(run: LiveRun) -> int:
    newest = newest_checkpoint(run.directory / "checkpoints")
    assert newest is not None
    return read_state(newest).cursor.next_step


def kill_after_recording(patch: pytest.MonkeyPatch, step: int) -> None:
    append = MetricsFile.append

    def append_and_die(file: MetricsFile, record: StepRecord) -> None:
        append(file, record)
        if record.step == step:
            raise Killed

    patch.setattr(MetricsFile, "append", append_and_die)


def test_a_checkpoint_is_completed_while_the_target_is_away(
    undisturbed: LiveRun, recipe: Path, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target dies after the step that is saved, and does not come back; the trainer waits to commit the next, whose
    pack it has already."""
    away, waits = threading.Event(), threading.Event()
    sources: list[BatchSource] = []
    start_source = BatchSource.start
    write, save, notice = checkpoint_module.write_safetensors, checkpoint_writer.save_checkpoint, WaitNotice.__call__
    append = MetricsFile.append
    saved_meanwhile: list[Path] = []

    def note_wait(waiting: WaitNotice, reason: Reason, seconds: float) -> None:
        notice(waiting, reason, seconds)
        if away.is_set():
            waits.set()

    def wait_and_write(*arguments: Any) -> tuple[int, int]:
        assert waits.wait(_DEADLINE)
        return write(*arguments)

    def save_and_stop(*arguments: Any, **settings: Any) -> Path:
        saved_meanwhile.append(save(*arguments, **settings))
        if len(saved_meanwhile) == 1:
            stop_here()
        return saved_meanwhile[-1]

    def note_source(source: BatchSource, next_step: int) -> None:
        sources.append(source)
        start_source(source, next_step)

    with live_target(recipe, tmp_path) as server, monkeypatch.context() as patch:

        def target_dies(file: MetricsFile, record: StepRecord) -> None:
            append(file, record)
            if record.step == 4:
                (source,) = sources
                with source._changed:
                    assert source._changed.wait_for(source._batch_or_end, _DEADLINE)
                go_away(server)
                away.set()

        patch.setattr(BatchSource, "start", note_source)
        patch.setattr(MetricsFile, "append", target_dies)
        patch.setattr(WaitNotice, "__call__", note_wait)
        patch.setattr(checkpoint_module, "write_safetensors", wait_and_write)
        patch.setattr(checkpoint_writer, "save_checkpoint", save_and_stop)
        run = LiveRun(recipe, server.address, tmp_path / "run", *LENGTH, "name=left-alone")
        run.train()
    assert saved_meanwhile[0].name == "step-00000005"
    assert newest_step(run) == max(run.losses()) + 1
    LiveRun(recipe, address, run.directory, *LENGTH, "name=left-alone").train()
    assert_same_run(run, undisturbed)


@pytest.mark.parametrize("fault", [full_disk, locked_by_another_program])
def test_a_run_waits_while_the_ledger_cannot_be_written(
    undisturbed: LiveRun,
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[LedgerStore], AbstractContextManager[None]],
) -> None:
    """From the record of step 7 until the trainer waits for the second time; nothing of it is seen in the run."""
    append, notice = MetricsFile.append, WaitNotice.__call__
    waits: list[Reason] = []
    with live_target(recipe, tmp_path) as server, ExitStack() as faults, monkeypatch.context() as patch:

        def begin(file: MetricsFile, record: StepRecord) -> None:
            append(file, record)
            if record.step == 7:
                with server.book.lock:
                    faults.enter_context(fault(server.store))

        def mend(waiting: WaitNotice, reason: Reason, seconds: float) -> None:
            notice(waiting, reason, seconds)
            waits.append(reason)
            if len(waits) == 2:
                with server.book.lock:
                    faults.close()

        patch.setattr(MetricsFile, "append", begin)
        patch.setattr(WaitNotice, "__call__", mend)
        run = LiveRun(recipe, server.address, tmp_path / "run", *LENGTH, "name=patient")
        assert run.train() == 0
    assert waits == [Reason.LEDGER_UNWRITABLE] * 2
    assert len(run.records()) == 24
    assert_same_run(run, undisturbed)
    report = lineage_report(tmp_path / "ledger.sqlite", "patient")
    assert report.exactly_once and (report.steps_committed, report.steps_discarded) == (24, 0), report


def loading_before_step_10_is_saved(latest: Path) -> Callable[..., SavedState | None]:
    """`load_weights` of a process that had loaded step 5 when an older one saved step 10."""
    load_weights = start.load_weights

    def point(step: int) -> None:
        latest.unlink()
        latest.symlink_to(f"step-{step:08d}")

    def load(*arguments: Any) -> SavedState | None:
        point(5)
        saved = load_weights(*arguments)
        point(10)
        return saved

    return load


def test_what_an_older_trainer_saved_while_it_was_taken_over_is_a_dead_branch(
    undisturbed: LiveRun, recipe: Path, address: str, ledger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older one has saved step 10 after the newer one had loaded step 5, which is killed before it saves itself."""
    run = LiveRun(recipe, address, tmp_path, *LENGTH, "name=taken-over")
    run.train_until(10)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(start, "load_weights", loading_before_step_10_is_saved(tmp_path / "checkpoints" / "latest"))
        kill_after_recording(patch, step=6)
        run.train()
    assert newest_step(run) == 5
    run.train()
    report = lineage_report(ledger / "ledger.sqlite", "taken-over")
    assert report.exactly_once, report
    assert_same_run(run, undisturbed)


def test_killed_between_its_seek_and_the_link_to_where_it_begins(
    undisturbed: LiveRun, recipe: Path, address: str, ledger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had loaded step 5, and the next start goes on from step 10: nothing that counts was trained in between."""
    run = LiveRun(recipe, address, tmp_path, *LENGTH, "name=between")
    run.train_until(10)

    def die(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(start, "load_weights", loading_before_step_10_is_saved(tmp_path / "checkpoints" / "latest"))
        patch.setattr(start, "go_on_from", die)
        run.train()
    assert newest_step(run) == 10
    run.train()
    report = lineage_report(ledger / "ledger.sqlite", "between")
    assert report.exactly_once, report
    assert (report.incarnations, report.steps_committed, report.steps_discarded) == (2, 24, 0)
    assert_same_run(run, undisturbed)


@pytest.mark.parametrize("step", [5, 10])
def test_killed_between_the_rename_of_a_checkpoint_and_its_link(
    undisturbed: LiveRun,
    recipe: Path,
    address: str,
    ledger: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: int,
) -> None:
    run = LiveRun(recipe, address, tmp_path, *LENGTH, f"name=unlinked-{step}")
    point = checkpoint_module._point

    def die(link: Path, name: str) -> None:
        if name == f"step-{step:08d}":
            raise Killed
        point(link, name)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(checkpoint_module, "_point", die)
        run.train()
    assert (tmp_path / "checkpoints" / f"step-{step:08d}").is_dir()
    assert newest_step(run) == 5, "what latest names; without it, the newest that is complete"
    run.train()
    assert lineage_report(ledger / "ledger.sqlite", f"unlinked-{step}").exactly_once
    assert_same_run(run, undisturbed)


def test_a_stop_while_a_checkpoint_is_written_keeps_both(
    undisturbed: LiveRun, recipe: Path, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = checkpoint_module.write_safetensors
    asked = threading.Lock()

    def stop_and_write(*arguments: Any) -> tuple[int, int]:
        if asked.acquire(blocking=False):
            stop_here()
        return write(*arguments)

    run = LiveRun(recipe, address, tmp_path, *LENGTH, "name=stopped")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "write_safetensors", stop_and_write)
        run.train()
    checkpoints = tmp_path / "checkpoints"
    assert load_checkpoint(checkpoints / "step-00000005").state.cursor.next_step == 5
    assert newest_step(run) == max(run.losses()) + 1
    run.train()
    assert len(run.records()) == 24, "a step was trained twice although nothing was lost"
    assert_same_run(run, undisturbed)


def test_a_directory_that_is_removed_while_it_is_trained_in_ends_the_run_in_words(
    recipe: Path, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = MetricsFile.append

    def remove(file: MetricsFile, record: StepRecord) -> None:
        append(file, record)
        if record.step == 2:
            shutil.rmtree(tmp_path / "run")

    monkeypatch.setattr(MetricsFile, "append", remove)
    with pytest.raises(SlipstreamError, match="somebody has removed or emptied the directory") as refused:
        LiveRun(recipe, address, tmp_path / "run", *LENGTH, "name=homeless").train()
    assert refused.value.reason is Reason.CHECKPOINT_INVALID
    assert not (tmp_path / "run").exists(), "nothing is written where the run was"


@pytest.mark.parametrize("full_at", ["the record", "the checkpoint"])
def test_a_full_disk_does_not_hide_a_loss_that_blew_up(
    recipe: Path, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_at: str
) -> None:
    """Of the third step in a row that is not finite, or of the one before it, whose save is still in flight."""
    append = MetricsFile.append
    recorded = threading.Event()

    def fill(file: MetricsFile, record: StepRecord) -> None:
        if record.step == 3:
            recorded.set()
            if full_at == "the record":
                file._file.close()
                file._file = Path("/dev/full").open("ab", buffering=0)  # noqa: SIM115 - closed as the other
        append(file, record)

    def find_no_room(*_: Any) -> tuple[int, int]:
        assert recorded.wait(_DEADLINE)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(MetricsFile, "append", fill)
    monkeypatch.setattr(checkpoint_module, "write_safetensors", find_no_room)
    explosive = ("optimizer.learning_rate=1e38", "optimizer.warmup_fraction=0", "checkpoint.every_steps=3")
    with pytest.raises(
        SlipstreamError, match=r"3 steps in a row, up to step 3 \(packs 3\); .* The disk is full, too\."
    ) as caught:
        LiveRun(recipe, address, tmp_path, *explosive, "name=explosive").train()
    assert caught.value.reason is Reason.LOSS_NOT_FINITE and "learning_rate" in caught.value.remedy
