"""Which steps are recorded, and that a step which is not takes the same way; the recording itself runs in tests/gpu."""

import pytest
import torch

from drafter_trainer.batch_source import StepBatch
from drafter_trainer.cuda_graph import Recorder, wants_graphs
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import OptimizerSpec, RunSpec
from tests.unit.trainer_runtime.test_step import make_pack, make_spec, make_step

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
        ("auto", "muon", CUDA, 18 * MILLION, False, "muon takes its learning rate from the host"),
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


@pytest.mark.parametrize(("kind", "device"), [("adamw", CPU), ("muon", CUDA)])
def test_what_cannot_be_recorded_is_refused_and_not_run_otherwise(kind: str, device: torch.device) -> None:
    with pytest.raises(SlipstreamError, match="cuda_graphs is true, but") as refused:
        wants_graphs(spec_with(True, kind), device, MILLION)
    assert refused.value.reason is Reason.SPEC_INVALID
    assert "cuda_graphs = false" in str(refused.value.remedy)


def test_a_recorder_that_is_off_runs_every_call() -> None:
    recorder, calls = Recorder(enabled=False), []
    for value in range(6):
        result = recorder("key", lambda inputs: calls.append(1) or inputs["x"] + 1, {"x": torch.tensor(value)})
        assert result.item() == value + 1
    assert len(calls) == 6 and recorder.recorded == ()


def test_a_step_that_lacks_a_quarantined_pack_counts_those_that_are_there() -> None:
    whole, short = make_step(make_spec(packs_per_step=1)), make_step(make_spec(packs_per_step=3))
    expected = whole.run(StepBatch(0, (make_pack(0),)), 1e-3).wait()
    numbers = short.run(StepBatch(0, (make_pack(0),)), 1e-3).wait()
    assert numbers == expected
    for name, weight in whole.optimizer.weights().items():
        assert torch.equal(short.optimizer.weights()[name], weight)


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
