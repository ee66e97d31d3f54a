"""A checkpoint of a drafter for the tiny target, without training: its weights are large enough to matter."""

from pathlib import Path

import torch
from torch import Tensor

from drafter_trainer.checkpoint import Checkpoint, save_checkpoint
from drafter_trainer.checkpoint_state import CheckpointState, Cursor, LoopState
from drafter_trainer.drafter import DFlashDrafter
from drafter_trainer.drafter_config import FULL, DFlashConfig
from drafter_trainer.run_directory import RunDirectory
from slipstream.run_spec.load import load_recipe
from slipstream.run_spec.spec import RunSpec
from slipstream.target_files import locate_target
from slipstream.target_fingerprint import fingerprint_target

TARGET_LAYERS = (1, 2)


def exportable_config(**changes: object) -> DFlashConfig:
    """Of two layers, for the target of `write_target`."""
    values: dict[str, object] = {
        "target_model_type": "llama",
        "num_target_layers": 4,
        "target_layer_ids": TARGET_LAYERS,
        "vocab_size": 392,
        "mask_token_id": 384,
        "embedding_scale": 1.0,
        "logit_soft_cap": None,
        "block_size": 4,
        "hidden_size": 64,
        "num_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "layer_types": (FULL, FULL),
        "sliding_window": None,
    }
    return DFlashConfig(**(values | changes))  # type: ignore[arg-type]


def drawn_weights(config: DFlashConfig, *, seed: int = 0) -> dict[str, Tensor]:
    """Norms around one, matrices that keep the size of what they multiply."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, parameter in DFlashDrafter(config).named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        weights[name] = drawn * 1.5 / parameter.shape[1] ** 0.5 if parameter.dim() == 2 else 1.0 + 0.2 * drawn
    return weights


def write_checkpoint(recipe: Path, run: Path, config: DFlashConfig, weights: dict[str, Tensor], step: int = 12) -> Path:
    """One complete checkpoint in a new run directory, as a trainer would have saved it; returns it."""
    spec: RunSpec = load_recipe(recipe).spec
    directory = RunDirectory(run)
    if directory.newest_incarnation() == 0:
        directory.claim(1, "trainers/tests")
    state = CheckpointState(
        run=spec.name,
        incarnation=1,
        cursor=Cursor(next_step=step, first_sequence_number=0),
        loop=LoopState(tokens=step * spec.data.pack_tokens),
        total_steps=24,
        target_fingerprint=fingerprint_target(locate_target(spec.target), spec.target.dtype),
        stream="streams/tests",
        spec=spec.model_dump(mode="json"),
        versions={"torch": str(torch.__version__)},
    )
    none = {"none": torch.zeros(1)}
    return save_checkpoint(directory, Checkpoint(state, config.to_json(), weights, none, none), keep=5)
