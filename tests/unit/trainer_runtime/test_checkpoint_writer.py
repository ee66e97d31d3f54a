"""Saves in flight: what is copied when, who waits for whom, what a failure does, and a kill in the middle."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from drafter_trainer import checkpoint as checkpoint_module
from drafter_trainer.checkpoint import load_checkpoint, save_checkpoint
from drafter_trainer.checkpoint_state import newest_checkpoint, read_state
from drafter_trainer.checkpoint_writer import CheckpointWriter, HostCopy, require_host_memory
from drafter_trainer.run_directory import RunDirectory
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from tests.unit.trainer_runtime.test_checkpoint import make_checkpoint

_DEADLINE = 30.0


class Incarnation:
    """Stands in for the link to the target: an incarnation that another thread may change."""

    def __init__(self) -> None:
        self.number = 1
        self.lock = threading.RLock()

    @contextmanager
    def held(self) -> Iterator[int]:
        with self.lock:
            yield self.number


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.claim(1, "trainers/a")
    return directory


@pytest.fixture
def incarnation() -> Incarnation:
    return Incarnation()


def make_writer(
    run: RunDirectory, incarnation: Incarnation, before: Callable[[], None] = lambda: None
) -> CheckpointWriter:
    return CheckpointWriter(run, incarnation.held, keep=3, before_saving=before)


@pytest.fixture
def held_write(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """(the tensors are about to be written, let them be written)"""
    begun, released = threading.Event(), threading.Event()
    write = checkpoint_module.write_safetensors

    def wait_and_write(*arguments: object) -> tuple[int, int]:
        begun.set()
        assert released.wait(_DEADLINE)
        return write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoint_module, "write_safetensors", wait_and_write)
    yield begun, released
    released.set()


def test_training_goes_on_while_the_copy_is_written(
    run: RunDirectory, incarnation: Incarnation, held_write: tuple[threading.Event, threading.Event]
) -> None:
    begun, released = held_write
    writer = make_writer(run, incarnation)
    saved = make_checkpoint(10)
    expected = {name: tensor.clone() for name, tensor in saved.drafter.items()}
    writer.save(saved)
    assert begun.wait(_DEADLINE)
    # The next step changes the weights, and records what it did, while the file is not even begun.
    for tensor in saved.drafter.values():
        tensor.zero_()
    with run.owned(1):
        (run.root / "metrics.jsonl").write_text("{}\n")
    writer.check()
    assert writer.newest is None and newest_checkpoint(run.checkpoints) is None
    released.set()
    writer.finish()
    assert writer.newest is not None and writer.newest == newest_checkpoint(run.checkpoints)
    loaded = load_checkpoint(writer.newest)
    assert all(torch.equal(loaded.drafter[name], tensor) for name, tensor in expected.items())
    assert all(torch.equal(loaded.optimizer[name], tensor) for name, tensor in saved.optimizer.items())
    assert loaded.state == saved.state


def test_the_second_save_waits_for_the_first(
    run: RunDirectory, incarnation: Incarnation, held_write: tuple[threading.Event, threading.Event]
) -> None:
    begun, released = held_write
    writer = make_writer(run, incarnation)
    writer.save(make_checkpoint(10))
    assert begun.wait(_DEADLINE)
    blocked = writer.blocked_seconds
    second = threading.Thread(target=writer.save, args=(make_checkpoint(20),))
    second.start()
    second.join(0.2)
    assert second.is_alive() and newest_checkpoint(run.checkpoints) is None
    released.set()
    second.join(_DEADLINE)
    writer.finish()
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["latest", "step-00000010", "step-00000020"]
    assert load_checkpoint(run.checkpoints / "step-00000010").state.cursor.next_step == 10
    assert writer.blocked_seconds > blocked + 0.1


def test_what_must_be_on_the_disk_before_is_there_before(run: RunDirectory, incarnation: Incarnation) -> None:
    seen: list[bool] = []
    writer = make_writer(run, incarnation, lambda: seen.append((run.checkpoints / "step-00000010").exists()))
    writer.save(make_checkpoint(10))
    writer.finish()
    assert seen == [False] and (run.checkpoints / "step-00000010").exists()


def test_a_rejoin_while_the_copy_is_written_changes_the_owner_and_loses_nothing(
    run: RunDirectory, incarnation: Incarnation, held_write: tuple[threading.Event, threading.Event]
) -> None:
    begun, released = held_write
    writer = make_writer(run, incarnation)
    writer.save(make_checkpoint(10))
    assert begun.wait(_DEADLINE)
    with incarnation.lock:
        run.claim(2, "trainers/a")
        incarnation.number = 2
    released.set()
    writer.finish()
    assert writer.newest is not None and read_state(writer.newest).incarnation == 2


def test_a_newer_trainer_that_claims_meanwhile_finds_nothing_of_the_older(
    run: RunDirectory, incarnation: Incarnation, held_write: tuple[threading.Event, threading.Event]
) -> None:
    begun, released = held_write
    writer = make_writer(run, incarnation)
    writer.save(make_checkpoint(10))
    assert begun.wait(_DEADLINE)
    run.claim(2, "trainers/b")
    released.set()
    with pytest.raises(SlipstreamError) as refused:
        writer.finish()
    assert refused.value.reason is Reason.INCARNATION_STALE
    assert list(run.checkpoints.iterdir()) == []


def test_a_newer_trainer_that_clears_up_is_no_fault_of_the_disk(
    run: RunDirectory, incarnation: Incarnation, held_write: tuple[threading.Event, threading.Event]
) -> None:
    begun, released = held_write
    writer = make_writer(run, incarnation)
    writer.save(make_checkpoint(10))
    assert begun.wait(_DEADLINE)
    run.claim(2, "trainers/b")
    released.set()
    newer = save_checkpoint(run, make_checkpoint(7, incarnation=2), keep=3)
    with pytest.raises(SlipstreamError) as refused:
        writer.finish()
    assert refused.value.reason is Reason.INCARNATION_STALE
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["latest", newer.name]
    assert load_checkpoint(newer).state.incarnation == 2


@pytest.mark.parametrize("end", ["check", "save", "finish"])
def test_a_failed_write_is_raised_in_the_training_thread_once(
    run: RunDirectory, incarnation: Incarnation, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_module, "write_safetensors", full)
    writer = make_writer(run, incarnation)
    writer.save(make_checkpoint(10))
    assert writer._thread is not None
    writer._thread.join(_DEADLINE)
    ways: dict[str, Callable[[], None]] = {
        "check": writer.check,
        "save": lambda: writer.save(make_checkpoint(20)),
        "finish": writer.finish,
    }
    with pytest.raises(SlipstreamError) as refused:
        ways[end]()
    assert refused.value.reason is Reason.DISK_FULL
    writer.close()
    assert list(run.checkpoints.iterdir()) == []


def test_a_run_that_fails_waits_for_its_last_checkpoint(
    run: RunDirectory, incarnation: Incarnation, caplog: pytest.LogCaptureFixture
) -> None:
    writer = make_writer(run, incarnation)
    writer.save(make_checkpoint(10))
    writer.close()
    assert newest_checkpoint(run.checkpoints) == run.checkpoints / "step-00000010"
    run.claim(2, "trainers/b")
    writer.save(make_checkpoint(20))
    writer.close()
    assert "checkpoint_not_saved" in caplog.text


KILLED_WHILE_WRITING = """
import os, signal, sys
from contextlib import nullcontext
from pathlib import Path
from drafter_trainer import checkpoint
from drafter_trainer.checkpoint_writer import CheckpointWriter
from drafter_trainer.run_directory import RunDirectory
from tests.unit.trainer_runtime.test_checkpoint import make_checkpoint

write = checkpoint.write_safetensors

def write_half_and_die(path, tensors):
    if path.name.startswith("optimizer"):
        path.write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    return write(path, tensors)

checkpoint.write_safetensors = write_half_and_die
writer = CheckpointWriter(RunDirectory(Path(sys.argv[1])), lambda: nullcontext(1), keep=1, before_saving=lambda: None)
writer.save(make_checkpoint(30))
writer.finish()
"""


def test_killed_in_the_middle_of_a_write_the_previous_one_is_valid(run: RunDirectory, incarnation: Incarnation) -> None:
    first = save_checkpoint(run, make_checkpoint(20), keep=1)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    killed = subprocess.run([sys.executable, "-c", KILLED_WHILE_WRITING, run.root], env=environment, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert any(run.checkpoints.glob(".unfinished-*/optimizer.safetensors")), "killed before it began to write"
    assert newest_checkpoint(run.checkpoints) == first
    assert load_checkpoint(first).state.cursor.next_step == 20
    run.claim(2, "trainers/b")
    incarnation.number = 2
    writer = make_writer(run, incarnation)
    writer.save(make_checkpoint(30))
    writer.finish()
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["latest", "step-00000020", "step-00000030"]


def test_memory_that_the_host_has_not_is_refused_in_words() -> None:
    class OnGpu(torch.Tensor):
        is_cuda = True

    state = {"drafter": {"a": torch.zeros(1 << 20)}}
    require_host_memory(state, available=0)
    on_gpu = {"drafter": {"a": torch.zeros(1 << 20).as_subclass(OnGpu)}}
    require_host_memory(on_gpu, available=4 << 20)
    with pytest.raises(SlipstreamError) as refused:
        require_host_memory(on_gpu, available=(4 << 20) - 1)
    assert refused.value.reason is Reason.ENVIRONMENT_UNSUPPORTED and "slipstream plan" in refused.value.remedy


def test_a_host_copy_keeps_every_shape_and_dtype() -> None:
    state = {
        "a": {
            "matrix": torch.arange(12.0).view(3, 4).t(),
            "reduced": torch.ones(5, dtype=torch.bfloat16),
            "scalar": torch.tensor(2.5),
            "empty": torch.zeros(0, 4),
        },
        "b": {"bytes": torch.arange(7, dtype=torch.uint8), "wide": torch.tensor([2**40])},
    }
    copy = HostCopy(state)
    copied = copy.take(state)
    copy.wait()
    for name, group in state.items():
        for key, tensor in group.items():
            assert copied[name][key].dtype == tensor.dtype and torch.equal(copied[name][key], tensor)
            assert copied[name][key].data_ptr() != tensor.data_ptr() or tensor.numel() == 0
