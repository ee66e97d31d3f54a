"""speculators 0.9.0: its `DFlashDraftModel`, forward compiled and flex_attention as it compiles and chooses them.

Its loss compares with the target's distribution, which it computes inside the step from the target's last hidden
state: one more product with the head than the others, part of how it works. With its `ce` loss and a target that is
certain of the recorded token the labels are those of the others. It divides by the number of counted slots; that is
turned into the sum of weights here, so that loss and gradients are the same. Optimizer and anchors are ours.

Its own trainer keeps float32 weights and casts them under autocast in every step; here the weights are bf16, which is
faster. Stand-ins: benchmarks/peers/stand_ins.py.
"""

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers.optimizer import SharedOptimizer
from benchmarks.peers.qwen3 import qwen3_config, round_parameters
from benchmarks.peers.side import SideUnavailableError
from benchmarks.peers.stand_ins import install_stand_ins
from benchmarks.peers.workload import (
    DECAY_GAMMA,
    Pack,
    Size,
    certain_states,
    compute_dtype,
    frozen_weights,
)
from drafter_trainer.anchors import build_block_targets
from drafter_trainer.slot_weights import decay_weights

VERSION = "0.9.0"
_DENOMINATOR_EPSILON = 1e-5
"""Which it adds to the number of counted slots."""


class SpeculatorsSide:
    """Its model with our optimizer and anchors."""

    split_features = False

    def __init__(self, size: Size, device: torch.device) -> None:
        self._size = size
        self._core, self.model = build_model(size, device)
        self._frozen = frozen_weights(size, device)
        self.model.embed_tokens.weight = nn.Parameter(self._frozen.embedding, requires_grad=False)
        for head in (self.model.lm_head, self.model.verifier_lm_head):
            head.weight = nn.Parameter(self._frozen.head, requires_grad=False)
        self._optimizer = SharedOptimizer(TrainedPart(self.model), size, device)
        from speculators.losses import resolve_loss_config

        kernels = "fused" if device.type == "cuda" else "eager"
        self._loss_config = resolve_loss_config("ce", kernels)
        self._inputs: dict[int, dict[str, Tensor]] = {}
        self._loss: Tensor | None = None
        self.description = (
            f"speculators {VERSION} DFlashDraftModel, {self.model._attn_impl}, forward compiled by itself on CUDA, "
            f"its ce loss ({kernels}) on the target's logits; fp32 masters, fused AdamW (ours)"
        )

    def step(self, pack: Pack) -> None:
        """Forward, backward, optimizer."""
        self._core.select_anchors = lambda *_: (pack.anchors.positions, pack.anchors.valid)
        inputs = self._inputs_of(pack)
        counted, weight = inputs["counted"], inputs["weight"]
        _, loss, _ = self.model(
            **{name: inputs[name] for name in MODEL_INPUTS},
            loss_config=self._loss_config,
            gamma=DECAY_GAMMA,
            max_anchors=self._size.anchors,
        )
        numerator = loss * (counted + _DENOMINATOR_EPSILON)
        self._optimizer.step(numerator, weight)
        self._loss = numerator.detach() / weight

    def last_loss(self) -> float:
        """Loss of the newest step."""
        assert self._loss is not None
        return float(self._loss)

    def _inputs_of(self, pack: Pack) -> dict[str, Tensor]:
        """A pack as its data loader would hand it over; made once for each, outside what is compared."""
        known = self._inputs.get(id(pack))
        if known is not None:
            return known
        size, tensors = self._size, pack.tensors
        assert pack.features is not None
        targets = build_block_targets(tensors, pack.anchors, block_size=size.block_size, mask_token_id=size.vocab - 1)
        counted = targets.counted[:, 1:].float()
        inputs = {
            "hidden_states": pack.features[None],
            "input_ids": tensors["input_ids"].long()[None],
            "loss_mask": tensors["loss_mask"].long()[None],
            "document_ids": tensors["document_ids"].long()[None],
            "position_ids": tensors["position_ids"].long()[None],
            "verifier_last_hidden_states": certain_states(pack, self._frozen)[None],
            "counted": counted.sum(),
            "weight": (counted * decay_weights(size.block_size, DECAY_GAMMA, counted.device)).sum(),
        }
        self._inputs[id(pack)] = inputs
        return inputs


MODEL_INPUTS = (
    *("hidden_states", "input_ids", "loss_mask", "document_ids", "position_ids"),
    "verifier_last_hidden_states",
)


class TrainedPart(nn.Module):
    """What the optimizer owns: the model without the target's tables and norm, under the names that all sides use."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.fc, self.hidden_norm, self.layers, self.norm = model.fc, model.hidden_norm, model.layers, model.norm


def build_model(size: Size, device: torch.device) -> tuple[Any, Any]:
    """Its `core` module and its draft model, weights in the compute dtype.

    Raises:
        SideUnavailableError: the package is not installed.
    """
    install_stand_ins("speculators")
    try:
        from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig, core
    except ImportError as error:
        raise SideUnavailableError(
            f"speculators {VERSION} cannot be imported ({error}): pip install --no-deps speculators=={VERSION}"
        ) from error
    # flex_attention has no backward on a CPU.
    attention = "simple_flex_attention" if device.type == "cuda" else "eager"
    config = DFlashSpeculatorConfig(
        transformer_layer_config=qwen3_config(size, attention),
        draft_vocab_size=size.vocab,
        block_size=size.block_size,
        aux_hidden_state_layer_ids=[layer + 1 for layer in size.target_layer_ids],
        mask_token_id=size.vocab - 1,
        sample_from_anchor=False,
    )
    with torch.device(device):
        model = DFlashDraftModel(config)
    round_parameters(model, compute_dtype(device))
    return core, model.train()
