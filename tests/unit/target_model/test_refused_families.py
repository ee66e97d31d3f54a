"""Architectures that cannot be served are refused in words: what mixes tokens otherwise, or changes logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import TargetSpec
from target_server.target_model import TargetModel
from tests.fakes.tiny_tokenizer import build_tiny_tokenizer

SIZES = {
    "vocab_size": 512,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS = {"num_experts_per_tok": 1, "moe_intermediate_size": 32}
DELTA = {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("mamba2", {"num_heads": 8, "head_dim": 16, "n_groups": 1}, "Mamba2ForCausalLM does not end in an RMS norm"),
    (
        "qwen3_next",
        {**EXPERTS, **DELTA, "head_dim": 16, "num_experts": 2, "shared_expert_intermediate_size": 32},
        "Layer 0 .*does not use transformers' attention interface",
    ),
    ("gpt_oss", {"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1}, "GptOssAttention .* uses s_aux"),
    ("granite", {"logits_scaling": 8.0}, "changes its logits after the head"),
    ("cohere", {}, "CohereForCausalLM does not end in an RMS norm"),
]


@pytest.mark.parametrize(("family", "sizes", "words"), REFUSED, ids=[family for family, _, _ in REFUSED])
def test_a_family_that_cannot_be_served(family: str, sizes: dict[str, Any], words: str, tmp_path: Path) -> None:
    build_tiny_tokenizer(tmp_path, vocab_size=384)
    with torch.random.fork_rng(devices=[]):
        AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(SIZES | sizes))).save_pretrained(tmp_path)
    with pytest.raises(SlipstreamError, match=words) as caught:
        TargetModel.load(TargetSpec(model=str(tmp_path), dtype="float32"), device="cpu")
    assert caught.value.reason is Reason.MODEL_INVALID and caught.value.remedy
