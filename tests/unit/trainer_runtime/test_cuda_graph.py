"""Which steps are recorded, and that a step which is not takes the same way; the recording itself runs in tests/gpu."""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from drafter_trainer import cuda_graph
from drafter_trainer.cuda_graph import RUNS_BEFORE_RECORDING, Function, Inputs, Recorder, wants_graphs
from drafter_trainer.training_packs import StepBatch
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import OptimizerSpec, RunSpec
from tests.unit.trainer_runtime.test_step import TOKENS, make_pack, make_spec, make_step

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
MILLION = 1_000_000


def spec_with(cuda_graphs: str | bool, kind: str = "adamw") -> RunSpec:
    spec = make_spec()
    train = spec.train.model_copy(update={"cuda_graphs": cuda_graphs})
    return spec.model_copy(update={"train": train, "optimizer": OptimizerSpec(kind=kind)})


@pytest.mark.parametrize(
    ("setting", "kind", "device", "parameters", "expected", "because"),
    [
        ("auto", "adamw", CUDA, 18 * MILLION, True, "18 million parameters: launching takes longer"),
        ("auto", "adamw", CUDA, 1050 * MILLION, False, "1050 million parameters: computing takes longer"),
        ("auto", "muon", CUDA, 18 * MILLION, True, "18 million parameters: launching takes longer"),
        ("auto", "adamw", CPU, 18 * MILLION, False, "the device is cpu"),
        (True, "adamw", CUDA, 1050 * MILLION, True, "cuda_graphs is true"),
        (False, "adamw", CUDA, 18 * MILLION, False, "cuda_graphs is false"),
    ],
)
def test_what_is_recorded_and_why(
    setting: str | bool, kind: str, device: torch.device, parameters: int, expected: bool, because: str
) -> None:
    wanted, why = wants_graphs(spec_with(setting, kind), device, parameters)
    assert wanted is expected and because in why


def test_what_cannot_be_recorded_is_refused_and_not_run_otherwise() -> None:
    with pytest.raises(SlipstreamError, match="cuda_graphs is true, but") as refused:
        wants_graphs(spec_with(True), CPU, MILLION)
    assert refused.value.reason is Reason.SPEC_INVALID
    assert "cuda_graphs = false" in str(refused.value.remedy)


def test_a_recorder_that_is_off_runs_every_call() -> None:
    recorder, calls = Recorder(enabled=False), []
    for value in range(6):
        result = recorder("key", lambda inputs: calls.append(1) or inputs["x"] + 1, {"x": torch.tensor(value)})
        assert result.item() == value + 1
    assert len(calls) == 6 and recorder.recorded == ()


def test_a_full_device_is_said_to_be_full_and_not_to_be_unfit(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def nothing(*_arguments: object, **_options: object) -> Iterator[None]:
        yield

    monkeypatch.setattr(torch.cuda, "graph", nothing)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)

    def fails_with(error: Exception) -> Function:
        def function(_inputs: Inputs) -> Tensor:
            raise error

        return function

    with pytest.raises(torch.OutOfMemoryError):
        cuda_graph._Recorded("pack", fails_with(torch.OutOfMemoryError("4 GiB")), {}, None)
    with pytest.raises(SlipstreamError, match="cannot be recorded") as refused:
        cuda_graph._Recorded("pack", fails_with(RuntimeError("it waits")), {}, None)
    assert refused.value.reason is Reason.ENVIRONMENT_UNSUPPORTED


def test_a_step_that_lacks_a_quarantined_pack_counts_those_that_are_there() -> None:
    whole, short = make_step(make_spec(packs_per_step=1)), make_step(make_spec(packs_per_step=3))
    expected = whole.run(StepBatch(0, (make_pack(0),)), 1e-3).wait()
    numbers = short.run(StepBatch(0, (make_pack(0),)), 1e-3).wait()
    assert numbers == expected
    for name, weight in whole.optimizer.weights().items():
        assert torch.equal(short.optimizer.weights()[name], weight)


class Replayed:
    """In place of a CUDA graph: runs the recorded function once more, on the memory that it was recorded with."""

    def __init__(self, key: Hashable, function: Function, inputs: Inputs, _pool: object) -> None:
        self._function = function
        self._inputs = {name: tensor.clone() for name, tensor in inputs.items()}

    def replay(self, inputs: Inputs) -> Tensor:
        assert inputs.keys() == self._inputs.keys()
        for name, tensor in inputs.items():
            assert tensor.shape == self._inputs[name].shape and tensor.dtype == self._inputs[name].dtype
            self._inputs[name].copy_(tensor)
        return self._function(self._inputs)


@pytest.mark.parametrize("objective", ["cross_entropy", "kl"])
@pytest.mark.parametrize("packs_per_step", [1, 3])
def test_a_replayed_step_depends_on_nothing_but_its_inputs(
    packs_per_step: int, objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packs, anchors, noise, learning rate: all that changes from step to step reaches the recorded functions."""
    spec = make_spec(packs_per_step=packs_per_step, objective=objective, slot_weights="dpace", precision="bfloat16")
    noisy = spec.train.model_copy(update={"feature_noise": 0.1})
    spec = spec.model_copy(update={"train": noisy, "optimizer": OptimizerSpec(ema_decay=0.9)})
    plain, replayed = make_step(spec), make_step(spec)
    plain._rate, replayed._rate = torch.zeros(()), torch.zeros(())
    monkeypatch.setattr(cuda_graph, "_Recorded", Replayed)
    replayed._recorder.enabled = True
    for number in range(3 * RUNS_BEFORE_RECORDING):
        packs = [make_pack(number * packs_per_step + i) for i in range(packs_per_step)]
        # The last step lacks a pack where there are several: it was quarantined.
        packs = packs[:-1] if number == 3 * RUNS_BEFORE_RECORDING - 1 and packs_per_step > 1 else packs
        batch, rate = StepBatch(number, tuple(packs)), 1e-3 / (number + 1)
        assert plain.run(batch, rate).wait() == replayed.run(batch, rate).wait(), number
    parts = {("pack", TOKENS, "first"), ("update", packs_per_step)}
    assert set(replayed._recorder.recorded) == parts | ({("pack", TOKENS, "later")} if packs_per_step > 1 else set())
    for name, tensor in (plain.optimizer.deployed_weights() | plain.optimizer.state_tensors()).items():
        ours = replayed.optimizer.deployed_weights() | replayed.optimizer.state_tensors()
        assert torch.equal(ours[name], tensor), name


def test_fused_adamw_reads_the_same_rate_from_a_tensor() -> None:
    """What a recorded step does, but for the float32 rounding of the rate, of which 2^-10 has none."""
    rate = 2.0**-10
    by_number, by_tensor = make_step(make_spec()), make_step(make_spec())
    by_tensor._rate = torch.zeros(())
    for number in range(3):
        batch = StepBatch(number, (make_pack(number),))
        assert by_number.run(batch, rate).wait() == by_tensor.run(batch, rate).wait()
    for name, weight in by_number.optimizer.weights().items():
        torch.testing.assert_close(by_tensor.optimizer.weights()[name], weight, rtol=1e-6, atol=1e-8)
