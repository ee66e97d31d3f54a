"""An FP8 checkpoint on CUDA: loaded there, in the dtype asked for, with the states of the weights it stands for."""

from pathlib import Path

import pytest
import torch

from slipstream.run_spec.spec import TargetSpec
from slipstream.target_loading import load_causal_lm
from target_server.target_model import TargetModel
from tests.fakes.quantised_models import quantise_to_fp8
from tests.unit.target_model.document_alone import load_reference, save_tiny_target
from tests.unit.target_model.test_packed_forward import LENGTHS, alone, by_layer, random_tokens

ROWS = sum(LENGTHS) + 13


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_of_an_fp8_target(dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    save_tiny_target(tmp_path / "fp8", "qwen3", hidden_size=256)
    save_tiny_target(tmp_path / "plain", "qwen3", hidden_size=256)
    meant = quantise_to_fp8(tmp_path / "fp8")
    reference = load_reference(tmp_path / "plain", "float32", "cuda")
    reference.load_state_dict(meant)
    spec = TargetSpec(model=str(tmp_path / "fp8"), dtype=dtype)  # type: ignore[arg-type]
    loaded = load_causal_lm(spec, "cuda")
    assert all(tensor.device.type == "cuda" for tensor in (*loaded.model.parameters(), *loaded.model.buffers()))
    target, tokens = TargetModel(loaded, spec, "f"), random_tokens(ROWS)

    target.prepare(ROWS)
    captured = target.capture(tokens, LENGTHS, range(4), True)

    as_it_is = loaded.quantised is not None and loaded.quantised.why_dequantised is None
    most = 0.1 if as_it_is else {"float32": 1e-3, "bfloat16": 0.02}[dtype]
    for ours, theirs in zip(by_layer(captured, 4), alone(reference, tokens, LENGTHS), strict=True):
        assert ours.dtype == getattr(torch, dtype)
        assert ((ours[: sum(LENGTHS)].float() - theirs).abs().mean() / theirs.abs().mean()).item() < most
    frozen = target.frozen_weights()
    assert torch.equal(frozen["lm_head.weight"], meant["lm_head.weight"].to(getattr(torch, dtype)))
