"""SpecForge 0.2.0: its `OnlineDFlashModel`, driven as its trainer drives it.

Three rows. `specforge`: its model, attention (flex_attention through transformers) and chunked, checkpointed loss, with
our optimizer (the same fused AdamW on the same flat float32 masters) and our anchors. `specforge-compiled`: the same,
and its draft model goes through torch.compile, which it does not do itself. `specforge-shipped`: its own `TrainerCore`,
optimizer and anchors, unwrapped, as on one GPU without sharding.

It has no packing: documents are the rows of its batch, padded to the longest. Nothing of it needs a stand-in; sglang,
which it pins, is only imported by what captures hidden states.
"""

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers.optimizer import SharedOptimizer
from benchmarks.peers.qwen3 import qwen3_config, round_parameters
from benchmarks.peers.side import SideUnavailableError
from benchmarks.peers.workload import (
    DECAY_GAMMA,
    LEARNING_RATE,
    Batch,
    Pack,
    Size,
    compute_dtype,
    drafter_weights,
    frozen_weights,
)

VERSION = "0.2.0"


class SpecForgeSide:
    """Its model with our optimizer and anchors."""

    split_features = False

    def __init__(self, size: Size, device: torch.device, *, compiled: bool = False) -> None:
        self.model = build_model(size, device)
        draft = self.model.draft_model
        self._optimizer = SharedOptimizer(draft, size, device)
        if compiled:
            draft.forward = torch.compile(draft.forward)
        self.description = (
            f"specforge {VERSION} OnlineDFlashModel, {self.model.attention_backend}"
            f"{', draft model compiled' if compiled else ''}, its chunked loss; fp32 masters, fused AdamW (ours)"
        )
        self._loss: Tensor | None = None

    def step(self, pack: Pack) -> None:
        """Forward, backward, optimizer; gradients of the sum are divided by the weights, as its trainer does."""
        total, weights = self._train(pack.batches[0], is_first=True)
        for batch in pack.batches[1:]:
            numerator, weight = self._train(batch, is_first=False)
            total, weights = total + numerator, weights + weight
        self._optimizer.apply(total, weights)
        self._loss = total / weights

    def _train(self, batch: Batch, *, is_first: bool) -> tuple[Tensor, Tensor]:
        """Gradients of one batch; its summed loss and its weight."""
        self.model._sample_anchor_positions = lambda *_: (batch.anchors.positions, batch.anchors.valid)
        _, _, metrics = self.model(**model_inputs(batch))
        numerator, weight = metrics["loss_terms"]
        self._optimizer.add(numerator, is_first=is_first)
        return numerator.detach(), weight

    def last_loss(self) -> float:
        """Loss of the newest step."""
        assert self._loss is not None
        return float(self._loss)


class SpecForgeShippedSide:
    """Its trainer's step: strategy, backend without a wrapper, `BF16Optimizer` with fp32 masters."""

    split_features = False

    def __init__(self, size: Size, device: torch.device) -> None:
        # First, because it says how to install the package where there is none.
        model = build_model(size, device)
        from specforge.optimizer import BF16Optimizer
        from specforge.training.backend import FSDPTrainingBackend, ParallelConfig
        from specforge.training.controller import TrainerCore
        from specforge.training.strategies.base import DFlashTrainStrategy

        weights = drafter_weights(size, device)
        with torch.no_grad():
            for name, parameter in model.draft_model.named_parameters():
                parameter.copy_(weights[name])
        backend = FSDPTrainingBackend(
            ParallelConfig(),
            optimizer_factory=lambda module: BF16Optimizer(module, lr=LEARNING_RATE, lr_scheduler="constant"),
        )
        backend.prepare_model(model, wrap=False, optimizer_target=model.draft_model)
        self._core = TrainerCore(DFlashTrainStrategy(model), backend)
        self._steps = 0
        self._loss: float | None = None
        self.description = (
            f"specforge {VERSION} TrainerCore, {model.attention_backend}, its chunked loss, its BF16Optimizer "
            "(fp32 masters, AdamW), its own anchors"
        )

    def step(self, pack: Pack) -> None:
        """One `train_step`.

        Raises:
            SideUnavailableError: the size wants several batches a step, which its trainer's core does not do.
        """
        from specforge.runtime.contracts import TrainBatch

        if len(pack.batches) != 1:
            raise SideUnavailableError("its train_step takes one batch, and this size asks for several")
        result = self._core.train_step(TrainBatch([str(self._steps)], "dflash", model_inputs(pack.batches[0])))
        self._steps += 1
        self._loss = result.loss

    def last_loss(self) -> float:
        """Loss of the newest step."""
        assert self._loss is not None
        return self._loss


def build_model(size: Size, device: torch.device) -> Any:
    """Its training model around the frozen tables, weights in the compute dtype.

    Raises:
        SideUnavailableError: the package is not installed.
    """
    try:
        from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
        from specforge.modeling.draft.dflash import DFlashDraftModel
    except ImportError as error:
        raise SideUnavailableError(
            f"specforge {VERSION} cannot be imported ({error}): pip install --no-deps specforge=={VERSION}"
        ) from error
    # flex_attention has no backward on a CPU.
    backend = "flex_attention" if device.type == "cuda" else "sdpa"
    with torch.device(device):
        draft = DFlashDraftModel(draft_config(size, backend))
    round_parameters(draft, compute_dtype(device))
    frozen = frozen_weights(size, device)
    embedding = nn.Embedding.from_pretrained(frozen.embedding)
    with torch.device("meta"):
        head = nn.Linear(size.hidden, size.vocab, bias=False)
    head.weight = nn.Parameter(frozen.head, requires_grad=False)
    model = OnlineDFlashModel(
        draft_model=draft,
        target_lm_head=head,
        target_embed_tokens=embedding,
        mask_token_id=size.vocab - 1,
        block_size=size.block_size,
        attention_backend=backend,
        num_anchors=size.anchors // size.documents,
        loss_decay_gamma=DECAY_GAMMA,
    )
    return model.train()


def draft_config(size: Size, backend: str) -> Any:
    """The configuration that its draft model reads."""
    config = qwen3_config(size, backend)
    config.num_target_layers = size.target_layers
    config.block_size = size.block_size
    config.dflash_config = {"target_layer_ids": list(size.target_layer_ids), "mask_token_id": size.vocab - 1}
    return config


def model_inputs(batch: Batch) -> dict[str, Tensor]:
    """Under its names."""
    return {"input_ids": batch.input_ids, "hidden_states": batch.features, "loss_mask": batch.loss_mask}
