"""⑪ What a slot's prediction costs, and the cost's gradient, from one set of logits.

Every gradient by the logits is written down, not left to autograd: a chunk's logits exist once, and its gradient of the
hidden states is one more product with the frozen head. An objective other than cross-entropy compares with the target's
distribution at that slot, which costs a product of its own; nothing is computed twice.

Shapes: R slots of a chunk, D hidden size, V vocabulary. p: the target's distribution, q: the drafter's, z: q's logits.
For f(q), ∂f/∂z = q·(f' - Σ q·f'), where f' is ∂f/∂q up to a constant.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from drafter_trainer.frozen_head import FrozenHead, gradient_by_hidden, logits_of
from slipstream.run_spec.objective import CROSS_ENTROPY, LK_HYBRID, ObjectiveName

_LOG_2 = math.log(2.0)


class SlotStatistics(NamedTuple):
    """Of R slots. `cost` float32 [R]: what is minimised. `cross_entropy` float32 [R]: of the recorded token. `correct`
    bool [R]: it is the most likely one. `gradient` [R, D], in the dtype of the hidden states: of each slot's cost.

    Slots' weights scale the gradient's rows. D-PACE's depend on all slots of a block: multiplied before the product
    with the head, they would keep its other factor [R, V] waiting in float32."""

    cost: Tensor
    cross_entropy: Tensor
    correct: Tensor
    gradient: Tensor


class Distribution(NamedTuple):
    """Of a softmax, float32 [R, V]: log-probabilities, always finite, and probabilities."""

    log: Tensor
    probability: Tensor


class Cost(NamedTuple):
    """An objective per slot, float32 [R], and its gradient by the logits of q, float32 [R, V]."""

    value: Tensor
    by_logits: Tensor

    def times(self, weight: float) -> "Cost":
        """Scaled; the gradient in place."""
        return Cost(weight * self.value, self.by_logits.mul_(weight))


class SlotInput(NamedTuple):
    """What is predicted where: `hidden` [R, D] of the drafter, `labels` int64 [R], and the target's own hidden states
    `target` [R, D], after its final norm; None where cross-entropy is all."""

    hidden: Tensor
    labels: Tensor
    target: Tensor | None


def slot_statistics(
    slots: SlotInput, head: FrozenHead, soft_cap: float | None, objective: Mapping[ObjectiveName, float], lk_eta: float
) -> SlotStatistics:
    """Statistics of slots under an objective.

    Args:
        slots: see `SlotInput`.
        head: [V, D].
        soft_cap: the target's tanh cap on logits; it holds for drafter and target.
        objective: names and weights; the cost is their weighted sum.
        lk_eta: of lk_hybrid.
    """
    if slots.target is None:
        assert objective.keys() == {CROSS_ENTROPY}, objective
        return _cross_entropy_statistics(slots.hidden, slots.labels, head, soft_cap)
    logits, slope = _capped(logits_of(slots.hidden, head), soft_cap)
    correct = logits.argmax(dim=-1) == slots.labels
    drafter = _distribution(logits)
    del logits
    target = _distribution(_capped(logits_of(slots.target, head), soft_cap)[0])
    costs = (_cost(name, target, drafter, slots.labels, lk_eta).times(weight) for name, weight in objective.items())
    cost = next(costs)
    for another in costs:
        cost = Cost(cost.value + another.value, cost.by_logits.add_(another.by_logits))
    return SlotStatistics(
        cost.value,
        _label_cross_entropy(drafter, slots.labels),
        correct,
        gradient_by_hidden(cost.by_logits if slope is None else cost.by_logits.mul_(slope), head, slots.hidden),
    )


def _cost(name: ObjectiveName, target: Distribution, drafter: Distribution, labels: Tensor, lk_eta: float) -> Cost:
    if name == CROSS_ENTROPY:
        return cross_entropy(drafter, labels)
    if name == LK_HYBRID:
        return lk_hybrid(target, drafter, lk_eta)
    return DIVERGENCES[name](target, drafter)


def cross_entropy(drafter: Distribution, labels: Tensor) -> Cost:
    """-log q(label); gradient q - onehot(label)."""
    others = put(drafter.probability.clone(), labels, torch.zeros_like(labels[:, None], dtype=torch.float32))
    # The label's q - 1 is minus what the others have: where q is nearly 1, the difference would lose its digits.
    by_logits = put(others, labels, -others.sum(dim=-1, keepdim=True))
    return Cost(_label_cross_entropy(drafter, labels), by_logits)


def _label_cross_entropy(drafter: Distribution, labels: Tensor) -> Tensor:
    return -drafter.log.gather(1, labels[:, None])[:, 0]


def kl(target: Distribution, drafter: Distribution) -> Cost:
    """KL(p‖q) = Σ p·(log p - log q) (Kullback and Leibler 1951; distillation: arXiv 1503.02531); gradient q - p.

    Covers all of the target's mass. For a one-hot target it is the cross-entropy.
    """
    value = (target.probability * (target.log - drafter.log)).sum(dim=-1)
    return Cost(value, drafter.probability - target.probability)


def reverse_kl(target: Distribution, drafter: Distribution) -> Cost:
    """KL(q‖p) = Σ q·(log q - log p) (for language models: arXiv 2306.08543); f' = log q - log p.

    Puts the drafter's mass where the target has most, and lets the rest go.
    """
    ratio = drafter.log - target.log
    value = (drafter.probability * ratio).sum(dim=-1)
    # Σ q is 1 up to rounding only, and ratios can be 1e4: what the mean leaves over is taken off as well.
    centred = ratio.sub_(value[:, None])
    rest = (drafter.probability * centred).sum(dim=-1, keepdim=True)
    return Cost(value, centred.sub_(rest).mul_(drafter.probability))


def js(target: Distribution, drafter: Distribution) -> Cost:
    """½ KL(p‖m) + ½ KL(q‖m), m = ½ (p + q) (Lin 1991); f' = ½ log(q/m). Never above log 2."""
    # From the difference of logs: m itself may be too small for a float.
    ratio = target.log - drafter.log
    target_to_middle = (target.probability * _log_to_middle(-ratio)).sum(dim=-1)
    of_drafter = _log_to_middle(ratio)
    drafter_to_middle = (drafter.probability * of_drafter).sum(dim=-1)
    by_logits = of_drafter.sub_(drafter_to_middle[:, None]).mul_(drafter.probability).mul_(0.5)
    return Cost(0.5 * (target_to_middle + drafter_to_middle), by_logits)


def _log_to_middle(ratio: Tensor) -> Tensor:
    """log 2 - log(1 + exp(ratio)): with ratio = log(p/q), log(q/m)."""
    return functional.softplus(ratio).neg_().add_(_LOG_2)


def tv(target: Distribution, drafter: Distribution) -> Cost:
    """½ Σ |p - q| = 1 - Σ min(p, q); f' = -1 where q < p, else 0.

    The sum of minima is the share of drafts that speculative sampling accepts (arXiv 2211.17192). The gradient vanishes
    with the overlap, which is small when a run begins: mix it, or use lk_hybrid.
    """
    too_low = drafter.probability * (drafter.probability < target.probability)
    by_logits = (drafter.probability * too_low.sum(dim=-1, keepdim=True)).sub_(too_low)
    return Cost(0.5 * (drafter.probability - target.probability).abs().sum(dim=-1), by_logits)


def lk_hybrid(target: Distribution, drafter: Distribution, eta: float) -> Cost:
    """λ KL(p‖q) + (1 - λ) TV(p, q), λ = exp(-eta Σ min(p, q)) (LK losses, arXiv 2602.23881), λ of every slot its own.

    No gradient flows through λ. Far from the target it is kl, near it tv.
    """
    divergence, distance = kl(target, drafter), tv(target, drafter)
    share = torch.exp(-eta * torch.minimum(target.probability, drafter.probability).sum(dim=-1))
    value = share * divergence.value + (1.0 - share) * distance.value
    by_logits = divergence.by_logits.mul_(share[:, None])
    return Cost(value, by_logits.add_(distance.by_logits.mul_(1.0 - share[:, None])))


DIVERGENCES: Mapping[ObjectiveName, Callable[[Distribution, Distribution], Cost]] = {
    "kl": kl,
    "reverse_kl": reverse_kl,
    "js": js,
    "tv": tv,
}
"""(target, drafter) → cost."""


def put(values: Tensor, columns: Tensor, entries: Tensor) -> Tensor:
    """values[r, columns[r]] = entries[r, 0], in place where that is cheaper; use the result.

    Compiled, a comparison fuses where a scatter writes [R, V] once more.
    """
    if torch.compiler.is_compiling():
        at_column = _columns(values) == columns[:, None].to(torch.int32)
        return torch.where(at_column, entries, values)
    return values.scatter_(1, columns[:, None], entries)


def _cross_entropy_statistics(
    hidden: Tensor, labels: Tensor, head: FrozenHead, soft_cap: float | None
) -> SlotStatistics:
    """Cross-entropy alone, in half the memory: neither log-probabilities nor probabilities are kept."""
    logits, slope = _capped(logits_of(hidden, head), soft_cap)
    top, guess = _largest(logits)
    picked = logits.gather(1, labels[:, None]) - top
    # In place: eager passes over [R, V] cost as much as the products; a compiled chunk fuses them either way.
    others = put(logits.sub_(top).exp_(), labels, torch.zeros_like(top))
    # The label's q - 1 is minus what the others have: where q is nearly 1, the difference would lose its digits.
    rest = others.sum(dim=-1, keepdim=True)
    total = rest + picked.exp()
    by_label = rest / total
    by_logits = put(others.mul_(total.reciprocal()), labels, -by_label)
    if slope is not None:
        by_logits = by_logits.mul_(slope)
    gradient = gradient_by_hidden(by_logits, head, hidden, largest=by_label)
    own = (total.log() - picked)[:, 0]
    return SlotStatistics(own, own, guess[:, 0] == labels, gradient)


def _largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest entry of each row, and the first column that has it; [R, 1] each.

    Compiled, a reduction that carries a column along with every value costs as much as all the others together.
    """
    if not torch.compiler.is_compiling():
        return logits.max(dim=-1, keepdim=True)
    top = logits.amax(dim=-1, keepdim=True)
    return top, torch.where(logits == top, _columns(logits), logits.shape[1]).amin(dim=-1, keepdim=True)


def _columns(logits: Tensor) -> Tensor:
    return torch.arange(logits.shape[1], device=logits.device, dtype=torch.int32)


def _capped(logits: Tensor, soft_cap: float | None) -> tuple[Tensor, Tensor | None]:
    """(cap·tanh(logits/cap), its slope), in place; the slope is None without a cap."""
    if soft_cap is None:
        return logits, None
    bounded = logits.div_(soft_cap).tanh_()
    slope = 1.0 - bounded * bounded
    return bounded.mul_(soft_cap), slope


def _distribution(logits: Tensor) -> Distribution:
    log = torch.log_softmax(logits, dim=-1)
    return Distribution(log, log.exp())
