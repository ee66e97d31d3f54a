"""A run with cross-entropy, AdamW and a cosine learns what it always has, bit for bit.

The computation is written out here once more, operation by operation in the order that checkpoints in use were trained
with. A change of that order is a change of results: it belongs into the changelog, not into a refactoring.
"""

import math

import pytest
import torch
from torch import Tensor

from drafter_trainer.anchors import build_block_targets
from drafter_trainer.block_mask import build_block_attention
from drafter_trainer.drafter import DFlashDrafter
from drafter_trainer.schedule import learning_rate
from drafter_trainer.slot_weights import decay_weights, dpace_weights
from drafter_trainer.training_packs import StepBatch
from slipstream.run_spec.spec import RunSpec
from tests.unit.trainer_runtime.test_step import BLOCK, make_config, make_frozen, make_pack, make_spec, make_step

STEPS = 6


class WrittenOut:
    """Masters, AdamW state and compute weights in flat buffers; every pack's loss as one chunk."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self.dtype = torch.float32 if spec.train.precision == "float32" else torch.bfloat16
        self.drafter = DFlashDrafter(make_config(spec))
        self.frozen = make_frozen(self.dtype)
        self.drafter.load_state_dict(make_step(spec).first_weights(spec.train.seed))
        named = sorted(self.drafter.named_parameters(), key=lambda item: item[1].dim() < 2)
        self.names, self.parameters = [name for name, _ in named], [parameter for _, parameter in named]
        sizes = [-(-parameter.numel() // 64) * 64 for parameter in self.parameters]
        self.starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self.matrices_end = sum(size for size, p in zip(sizes, self.parameters, strict=True) if p.dim() >= 2)
        self.master, self.first, self.second = (torch.zeros(sum(sizes)) for _ in range(3))
        for parameter, view in zip(self.parameters, self.views(self.master), strict=True):
            view.copy_(parameter.detach())
        self.compute = self.master if self.dtype == torch.float32 else self.master.to(self.dtype)
        for parameter, view in zip(self.parameters, self.views(self.compute), strict=True):
            parameter.data = view
        self.applied = torch.zeros(())

    def views(self, flat: Tensor) -> list[Tensor]:
        return [
            flat[start : start + p.numel()].view(p.shape) for start, p in zip(self.starts, self.parameters, strict=True)
        ]

    def pack_loss(self, number: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(numerator, weight, hidden states, their gradient) of a pack."""
        pack, config = make_pack(number), self.drafter.config
        targets = build_block_targets(pack.tensors, pack.anchors, block_size=BLOCK, mask_token_id=config.mask_token_id)
        positions = pack.tensors["position_ids"]
        attention = build_block_attention(self.drafter.attention_layout("sdpa"), pack.anchors, positions)
        features = torch.cat([pack.tensors[name] for name in config.feature_names], dim=-1).to(self.dtype)
        embeddings = self.frozen.embed(targets.block_ids.flatten())
        hidden = self.drafter(features, embeddings, positions, targets.block_positions.flatten(), attention)

        counted, head = targets.counted[:, 1:], self.frozen.head
        rows = counted.flatten().nonzero()[:, 0]
        inner = hidden.detach().view(len(counted), BLOCK, -1)[:, 1:].flatten(0, 1)[rows]
        labels = targets.labels[:, 1:].flatten()[rows]
        logits = (inner @ head.t()).float()
        top = logits.max(dim=-1, keepdim=True).values
        picked = logits.gather(1, labels[:, None]) - top
        others = logits.sub_(top).exp_().scatter_(1, labels[:, None], torch.zeros_like(top))
        rest = others.sum(dim=-1, keepdim=True)
        total = rest + picked.exp()
        entropy = torch.zeros(counted.numel())
        entropy[rows] = (total.log() - picked)[:, 0]
        entropy = entropy.view(counted.shape)
        spec = self.spec.loss
        fixed = torch.ones(BLOCK - 1) if spec.slot_weights != "decay" else decay_weights(BLOCK, BLOCK / 2)
        weights = fixed * counted
        final = weights if spec.slot_weights != "dpace" else dpace_weights(entropy, counted, spec.dpace_alpha)
        by_logits = others.mul_(total.reciprocal()).scatter_(1, labels[:, None], -(rest / total))
        gradient = torch.zeros(counted.numel(), inner.shape[1], dtype=self.dtype)
        gradient[rows] = ((by_logits.to(self.dtype) @ head) * final.flatten()[rows][:, None]).to(self.dtype)
        whole = torch.zeros_like(hidden).view(len(counted), BLOCK, -1)
        whole[:, 1:] = gradient.view(len(counted), BLOCK - 1, -1)
        return (final * entropy).sum(), weights.sum(), hidden, whole.view_as(hidden)

    def step(self, numbers: tuple[int, int], rate: float) -> float:
        numerator, weight, gradient = torch.zeros(()), torch.zeros(()), torch.zeros_like(self.master)
        for number in numbers:
            own, own_weight, hidden, by_hidden = self.pack_loss(number)
            numerator, weight = numerator + own, weight + own_weight
            gradients = torch.autograd.grad(hidden, self.parameters, by_hidden)
            for view, part in zip(self.views(gradient), gradients, strict=True):
                view.add_(part.float())
        norm = torch.linalg.vector_norm(gradient) / weight
        self.applied += 1.0
        optimizer = self.spec.optimizer
        for part in (slice(0, self.matrices_end), slice(self.matrices_end, None)):
            torch._fused_adamw_(
                [self.master[part]], [gradient[part]], [self.first[part]], [self.second[part]], [], [self.applied],
                amsgrad=False, lr=rate, beta1=optimizer.betas[0], beta2=optimizer.betas[1], weight_decay=0.0,
                eps=optimizer.epsilon, maximize=False, grad_scale=(norm / optimizer.clip_norm).clamp(min=1.0) * weight,
                found_inf=torch.zeros(()),
            )  # fmt: skip
        if self.compute is not self.master:
            self.compute.copy_(self.master)
        return (numerator / weight).item()


def cosine(step: int) -> float:
    """Of a run of 50 steps at the defaults: two of warm-up."""
    if step < 2:
        return 6e-4 * (step + 1) / 2
    return 6e-4 * (0.0 + (1.0 - 0.0) * (0.5 * (1.0 + math.cos(math.pi * min(1.0, (step - 2) / 48)))))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("slot_weights", ["uniform", "decay", "dpace"])
def test_losses_weights_and_state_are_what_they_were(precision: str, slot_weights: str) -> None:
    spec = make_spec(packs_per_step=2, precision=precision, slot_weights=slot_weights)
    step, expected = make_step(spec), WrittenOut(spec)
    for number in range(STEPS):
        rate = learning_rate(spec.optimizer, number, 50)
        assert rate == cosine(number)
        packs = (2 * number, 2 * number + 1)
        numbers = step.run(StepBatch(number, tuple(make_pack(pack) for pack in packs)), rate).wait()
        assert numbers.acceptance.loss == pytest.approx(expected.step(packs, rate), rel=1e-7), number
    state, weights = step.optimizer.state_tensors(), step.optimizer.weights()
    for i, name in enumerate(expected.names):
        assert torch.equal(weights[name], expected.views(expected.master)[i]), name
        assert torch.equal(state[f"exp_avg.{name}"], expected.views(expected.first)[i]), name
        assert torch.equal(state[f"exp_avg_sq.{name}"], expected.views(expected.second)[i]), name
