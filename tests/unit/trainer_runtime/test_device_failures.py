"""What fails on the device is reported with its phase, whichever part of the loop it comes out of."""

import errno
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

from drafter_trainer.build_step import prepare_device
from drafter_trainer.device_failures import Phase, failures_reported, reports_kept_in
from drafter_trainer.doctor import examine
from drafter_trainer.loop import RunParts, Standing, TrainingLoop
from drafter_trainer.training_packs import StepBatch
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import RunSpec
from tests.unit.trainer_runtime.test_step import make_pack, make_spec, make_step

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore words")
LOST = RuntimeError("CUDA error: an illegal memory access was encountered")


def fields_of(log: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.slipstream_fields for record in log.records if record.message == "phase_failed"]  # type: ignore[attr-defined]


NO_CONTEXT = RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported asynchronously")
NO_HANDLE = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


@pytest.mark.parametrize(
    "error",
    [
        FULL,
        BackendCompilerFailed(lambda *_: None, FULL, None),
        NO_CONTEXT,
        BackendCompilerFailed(lambda *_: None, NO_HANDLE, None),
    ],
)
@pytest.mark.parametrize("phase", list(Phase))
def test_full_memory_ends_in_words(error: Exception, phase: Phase, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SlipstreamError) as raised, failures_reported(phase, {"input_ids": (128,)}):
        raise error
    assert raised.value.reason is Reason.OUT_OF_MEMORY and raised.value.exit_code == 6
    assert f"was full while {phase.value}: " in raised.value.message and "\n" not in raised.value.message
    assert any(words in raised.value.remedy for words in ("lower ", "train.precision", "CUDA_VISIBLE_DEVICES"))
    (fields,) = fields_of(caplog)
    assert fields["phase"] == phase.value and fields["shapes"] == "input_ids (128,)"
    assert str(getattr(error, "inner_exception", error)).splitlines()[0] in fields["error"] and fields["torch"] == str(
        torch.__version__
    )


def test_full_memory_of_the_cpu_is_no_defect() -> None:
    with pytest.raises(SlipstreamError) as raised, failures_reported(Phase.STEP):
        torch.empty(2**60, dtype=torch.uint8)
    assert raised.value.reason is Reason.OUT_OF_MEMORY and raised.value.exit_code == 6
    assert raised.value.message.startswith("This machine's memory was full while starting a step: ")
    assert "lower train.anchors_per_pack" in raised.value.remedy and "GPU" not in raised.value.remedy


@pytest.mark.parametrize(
    "error",
    [
        LOST,
        SlipstreamError("flex_attention ran uncompiled", reason=Reason.DENSE_ATTENTION),
        SlipstreamError("torch began to compile", reason=Reason.PACK_OUTSIDE_BUCKETS),
    ],
)
def test_what_is_unforeseen_is_reported_and_raised_as_it_is(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(type(error)) as raised, failures_reported(Phase.WARM_UP):
        raise error
    assert raised.value is error
    assert str(error) in fields_of(caplog)[0]["error"]


def test_what_was_refused_in_words_is_no_failure_of_the_device(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SlipstreamError), failures_reported(Phase.SAVE):
        raise SlipstreamError("The disk is full.", reason=Reason.DISK_FULL)
    assert not fields_of(caplog)


def failing(error: Exception) -> Callable[..., Any]:
    def fail(*_: object) -> None:
        raise error

    return fail


def loop_with(monkeypatch: pytest.MonkeyPatch, where: str, error: Exception) -> TrainingLoop:
    """A loop over one real pack and the real step, in which one call fails."""
    spec = make_spec()
    step = make_step(spec)
    batch = StepBatch(0, (make_pack(0),))
    source = SimpleNamespace(is_ready=lambda: True, next_batch=lambda: batch)
    if where == "next_batch":
        source.next_batch = failing(error)
    elif where == "run":
        monkeypatch.setattr(step, "run", failing(error))
    else:
        pending = step.run(batch, 1e-3)
        monkeypatch.setattr(pending, "wait", failing(error))
        monkeypatch.setattr(step, "run", lambda *_: pending)
    unused: Any = None
    reporter: Any = SimpleNamespace(begin=lambda: None)
    feeder: Any = source
    parts = RunParts(spec, unused, step, feeder, unused, unused, unused, unused, reporter, unused, unused)
    return TrainingLoop(parts, Standing(0, total_steps=10))


@pytest.mark.parametrize(("where", "phase"), [("next_batch", Phase.PACKS), ("run", Phase.STEP), ("wait", Phase.RESULT)])
def test_every_part_of_the_loop_is_watched(
    where: str, phase: Phase, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(SlipstreamError, match=phase.value) as raised:
        loop_with(monkeypatch, where, FULL).run()
    assert raised.value.reason is Reason.OUT_OF_MEMORY
    caplog.clear()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        loop_with(monkeypatch, where, LOST).run()
    (fields,) = fields_of(caplog)
    assert fields["phase"] == phase.value
    assert ("input_ids (128,)" in fields["shapes"]) == (where != "next_batch")


RECOMPILED = RuntimeError(
    "Detected recompile when torch.compile stance is 'fail_on_recompile'. function name: 'drafter'\n"
    "    triggered by the following guard failure(s):\n"
    "    - 0/0: tensor 'args[0]' size mismatch at index 0. expected 128"
)


def test_a_missing_graph_ends_in_words_with_guard_and_shapes(tmp_path: Path) -> None:
    with (
        pytest.raises(SlipstreamError) as raised,
        reports_kept_in(tmp_path / "failures"),
        failures_reported(Phase.STEP, {"input_ids": (256,)}),
    ):
        raise RECOMPILED
    assert raised.value.reason is Reason.PACK_OUTSIDE_BUCKETS
    assert "size mismatch at index 0. expected 128" in raised.value.message
    assert "input_ids (256,)" in raised.value.message and "\n" not in raised.value.message
    (file,) = (tmp_path / "failures").iterdir()
    report = json.loads(file.read_text())
    assert report["guards"] == "tensor 'args[0]' size mismatch at index 0. expected 128"
    assert {"phase", "error", "shapes", "torch", "python", "graphs"} <= report.keys()


def test_every_report_is_kept_beside_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RuntimeError), reports_kept_in(tmp_path / "failures"), failures_reported(Phase.STEP):
        raise LOST
    (fields,) = fields_of(caplog)
    assert json.loads(Path(fields["report"]).read_text())["error"] == f"RuntimeError: {LOST}"
    caplog.clear()
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeError), reports_kept_in(tmp_path / "file"), failures_reported(Phase.STEP):
        raise LOST
    assert "File exists" in fields_of(caplog)[0]["report_not_kept"], "and the failure is still the one that was"


def test_what_torch_cannot_compile_ends_in_words_and_the_report_has_the_traceback(tmp_path: Path) -> None:
    failed = BackendCompilerFailed(lambda *_: None, TypeError("list indices must be integers"), None)
    with (
        pytest.raises(SlipstreamError, match="could not compile the training step for this machine") as raised,
        reports_kept_in(tmp_path),
        failures_reported(Phase.WARM_UP),
    ):
        raise failed
    assert raised.value.reason is Reason.ENVIRONMENT_UNSUPPORTED and raised.value.exit_code == 4
    assert "list indices must be integers" in raised.value.message and "\n" not in raised.value.message
    (file,) = tmp_path.iterdir()
    assert "raise failed" in json.loads(file.read_text())["traceback"]
    with pytest.raises(BackendCompilerFailed), failures_reported(Phase.STEP):
        raise failed


@pytest.mark.parametrize(
    "inner",
    [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), RuntimeError("worker: [Errno 28] No space left on device")],
)
def test_a_disk_without_room_for_compiled_code_is_no_fault_of_torch(
    inner: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/full")
    with pytest.raises(SlipstreamError) as raised, failures_reported(Phase.WARM_UP):
        raise BackendCompilerFailed(lambda *_: None, inner, None)
    assert raised.value.reason is Reason.DISK_FULL
    assert "no room for compiled code in the compile cache /full" in raised.value.message
    assert "SLIPSTREAM_COMPILE_CACHE" in raised.value.remedy


def spec_on_gpu() -> RunSpec:
    spec = make_spec()
    return spec.model_copy(update={"train": spec.train.model_copy(update={"device": "cuda", "attention": "flex"})})


def test_a_torch_without_what_the_guards_need_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "drafter_trainer.flex_policy", None)
    with pytest.raises(SlipstreamError, match="is not one that Slipstream can guard") as raised:
        prepare_device(spec_on_gpu())
    assert raised.value.reason is Reason.ENVIRONMENT_UNSUPPORTED and "2.11" in raised.value.remedy
    assert examine() == {"problem": raised.value.message, "remedy": raised.value.remedy}


def test_a_trainer_and_a_doctor_do_the_same_on_a_gpu_in_the_same_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the compile cache, which is chosen before anything is compiled."""
    order: list[str] = []

    def says(name: str, answer: Any = None) -> Any:
        def called(*given: object, **_: object) -> Any:
            order.append(" ".join([name, *map(str, given[:1])]))
            return answer

        return called

    guards = SimpleNamespace(in_words=lambda: "all")
    policy = SimpleNamespace(
        check_environment=says("check_environment", guards),
        configure_compiler=says("configure_compiler"),
        install_tripwire=says("install_tripwire"),
        self_test=says("self_test"),
    )
    monkeypatch.setitem(sys.modules, "drafter_trainer.flex_policy", policy)
    monkeypatch.setattr("drafter_trainer.attention_guard.use_compile_cache", lambda *_, **__: says("cache", "/c")())
    for name, found in {"is_available": True, "get_device_name": "a card"}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, found=found: found)
    monkeypatch.setattr(torch.cuda, "set_device", says("set_device"))
    assert prepare_device(spec_on_gpu()) == (torch.device("cuda", 0), "/c")
    rest = ["configure_compiler", "install_tripwire", "self_test cuda:0"]
    assert order == ["check_environment cuda", "set_device cuda:0", "cache", *rest]
    order.clear()
    assert "passed" in examine()
    assert order == ["check_environment cuda:0", "set_device cuda:0", *rest]


def test_one_thread_is_no_plural(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    spec = make_spec()
    prepare_device(spec.model_copy(update={"train": spec.train.model_copy(update={"device": "cpu"})}))
    (said,) = [record.slipstream_fields for record in caplog.records if record.message == "device"]  # type: ignore[attr-defined]
    assert said["name"] == "1 thread"


def test_a_gpu_that_others_have_filled_is_said_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first thing that a trainer and a doctor do on a GPU can meet a full one, too."""
    for name, found in {"is_available": True, "device_count": 1, "get_device_name": "a card"}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, found=found: found)
    monkeypatch.setattr(torch.cuda, "set_device", failing(NO_CONTEXT))
    monkeypatch.setattr(torch.cuda, "memory_summary", lambda **_: "nothing")
    on_gpu = spec_on_gpu()
    with pytest.raises(SlipstreamError, match="was full while trying compiled attention") as raised:
        prepare_device(on_gpu)
    assert raised.value.reason is Reason.OUT_OF_MEMORY and "CUDA_VISIBLE_DEVICES" in raised.value.remedy
    answer = examine()
    assert "was full while trying compiled attention" in answer["problem"] and answer["remedy"] == raised.value.remedy
