"""A training step of small sizes on CUDA, as a run would build it: grouped heads, a full and a sliding layer."""

import torch

from drafter_trainer.drafter_config import DrafterConfig, resolve_drafter_config
from drafter_trainer.frozen_weights import FrozenWeights
from drafter_trainer.step import COMPUTE_DTYPES, TrainingStep
from drafter_trainer.training_packs import PackPlan, payload_shapes
from slipstream.run_spec.spec import DataSpec, DrafterSpec, RunSpec, TargetSpec, TrainSpec
from slipstream.wire.target_config import TargetConfig

HIDDEN, VOCABULARY, ANCHORS, BLOCK = 512, 4096, 64, 8
LENGTHS = (512, 1024)

TARGET = TargetConfig(
    model_type="qwen3",
    num_layers=8,
    hidden_size=HIDDEN,
    intermediate_size=1024,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=128,
    vocab_size=VOCABULARY,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
    embedding_scale=1.0,
    logit_soft_cap=None,
    norm_weight_offset=0.0,
    tokenizer_length=VOCABULARY - 6,
    mask_token_id=None,
    special_tokens={},
)


def real_spec(precision: str = "bfloat16", **train: object) -> RunSpec:
    """The run definition; `train`: changes of that section."""
    return RunSpec(
        name="small",
        target=TargetSpec(model="m", dtype="bfloat16"),
        data=DataSpec(files=("d",), pack_tokens=LENGTHS[-1]),
        drafter=DrafterSpec(
            num_layers=2,
            target_layer_ids=(1, 3, 5),
            block_size=BLOCK,
            layer_types=("full_attention", "sliding_attention"),
            sliding_window=300,
        ),
        train=TrainSpec(precision=precision, anchors_per_pack=ANCHORS, max_steps=10, **train),
    )


def real_config(spec: RunSpec) -> DrafterConfig:
    """The drafter of the run."""
    return resolve_drafter_config(spec.drafter, TARGET)


def real_step(spec: RunSpec, lengths: tuple[int, ...] = LENGTHS) -> TrainingStep:
    """On the current CUDA device, for these pack lengths; weights are undefined."""
    generator = torch.Generator("cuda").manual_seed(0)
    dtype = COMPUTE_DTYPES[spec.train.precision]
    tables = [
        0.05 * torch.randn(VOCABULARY, HIDDEN, generator=generator, device="cuda").to(dtype) for _ in ("embed", "head")
    ]
    frozen = FrozenWeights(tables[0], tables[1], torch.ones(HIDDEN, device="cuda"), TARGET.embedding_scale)
    return TrainingStep(real_config(spec), frozen, spec, lengths)


def real_plan(spec: RunSpec, lengths: tuple[int, ...] = LENGTHS) -> PackPlan:
    """Of the same packs."""
    shapes = payload_shapes(real_config(spec).feature_names, lengths[-1], HIDDEN)
    return PackPlan(0, spec.train.packs_per_step, 1, shapes, ANCHORS, 0, 2, 60.0, lengths[:-1])
