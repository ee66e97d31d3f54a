"""The oracle: what transformers itself computes for one document alone, with its own eager attention."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from slipstream.run_spec.spec import TargetSpec
from slipstream.target_loading import LoadedTarget, load_causal_lm
from tests.fakes.tiny_models import Family, save_tiny_model
from tests.fakes.tiny_tokenizer import build_tiny_tokenizer

VOCAB_SIZE = 512


def save_tiny_target(directory: Path, family: Family = "llama", **model: object) -> Path:
    """A whole model directory: tokenizer with chat template, configuration, weights."""
    build_tiny_tokenizer(directory, style="chatml", vocab_size=VOCAB_SIZE)
    save_tiny_model(directory, family, vocab_size=VOCAB_SIZE, tied=family.startswith("gemma"), **model)  # type: ignore[arg-type]
    return directory


def load_tiny_target(directory: Path, dtype: str = "float32", device: str = "cpu") -> LoadedTarget:
    """Load it as the target server does."""
    return load_causal_lm(TargetSpec(model=str(directory), dtype=dtype), device)  # type: ignore[arg-type]


def load_reference(directory: Path, dtype: str = "float32", device: str = "cpu") -> PreTrainedModel:
    """The model as transformers loads it, with its plainest attention."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype), attn_implementation="eager")
    return model.to(device).eval()


@torch.inference_mode()
def layer_outputs(model: PreTrainedModel, token_ids: npt.NDArray[np.int32]) -> list[Tensor]:
    """Outputs `[L, D]` of every decoder layer for one document `[L]`.

    `hidden_states[l + 1]` of transformers, but for the last layer, where it is given after the final norm.
    """
    last: list[Tensor] = []

    def keep(_module: object, _arguments: object, output: Tensor | tuple[Tensor, ...]) -> None:
        last.append(output[0] if isinstance(output, tuple) else output)

    handle = model.model.layers[-1].register_forward_hook(keep)
    row = torch.from_numpy(token_ids.astype(np.int64))[None].to(model.device)
    states = model(row, output_hidden_states=True, use_cache=False).hidden_states
    handle.remove()
    return [state[0] for state in (*states[1:-1], last[0])]
