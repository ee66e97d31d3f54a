"""An independent DFlash training step: plain loops over documents, blocks and slots, in any precision.

Written from the papers' definitions and not from the code under test: it shares no function with it, visits one block
at a time, never builds a mask over the pack, and leaves gradients to autograd. float64 makes it the measure of errors.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Sizes:
    """What the weights' shapes do not say."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    epsilon: float
    theta: float
    windows: tuple[int | None, ...]
    """Per layer: the sliding window, or None for full attention."""


@dataclass(frozen=True)
class Block:
    """One block: pack row of its anchor, what its slots read, and per slot its label, None if it does not count."""

    anchor: int
    token_ids: list[int]
    labels: list[int | None]


def blocks_of(pack: dict[str, list[int]], anchors: list[int | None], block_size: int, mask_token: int) -> list[Block]:
    """Blocks of a pack given as lists; None stands for an invalid anchor, whose block reads and predicts nothing."""
    blocks = []
    length = len(pack["input_ids"])
    for anchor in anchors:
        if anchor is None:
            blocks.append(Block(-1, [], [None] * block_size))
            continue
        labels: list[int | None] = [None] * block_size
        for slot in range(1, block_size):
            row = anchor + slot
            same_document = row < length and pack["document_ids"][row] == pack["document_ids"][anchor]
            if not same_document or pack["loss_mask"][row] == 0:
                break
            labels[slot] = pack["input_ids"][row]
        blocks.append(Block(anchor, [pack["input_ids"][anchor]] + [mask_token] * (block_size - 1), labels))
    return blocks


def visible_rows(pack: dict[str, list[int]], anchor: int, slot: int, window: int | None) -> list[int]:
    """Context rows that a slot sees, by walking the whole pack."""
    rows = []
    for row, document in enumerate(pack["document_ids"]):
        if document != pack["document_ids"][anchor] or row >= anchor:
            continue
        distance = pack["position_ids"][anchor] + slot - pack["position_ids"][row]
        if window is None or 0 <= distance < window:
            rows.append(row)
    return rows


def visible_slots(slot: int, block_size: int, window: int | None) -> list[int]:
    """Slots of its own block that a slot sees."""
    return [other for other in range(block_size) if window is None or 0 <= slot - other < window]


def norm(vector: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Root mean square norm of [..., size]."""
    return vector * weight / (vector.pow(2).mean(-1, keepdim=True) + epsilon).sqrt()


def turn(vector: Tensor, position: int, theta: float) -> Tensor:
    """Rotate a head vector [d] as d/2 complex numbers."""
    half = vector.numel() // 2
    speeds = torch.tensor([theta ** (-2.0 * i / vector.numel()) for i in range(half)], dtype=vector.dtype)
    turned = torch.complex(vector[:half], vector[half:]) * torch.polar(torch.ones_like(speeds), position * speeds)
    return torch.cat((turned.real, turned.imag))


def heads_of(vector: Tensor, matrix: Tensor, count: int) -> list[Tensor]:
    """matrix @ vector, cut into `count` heads."""
    return list((matrix @ vector).chunk(count))


def block_hidden(
    weights: Weights, sizes: Sizes, context: dict[int, Tensor], embeddings: list[Tensor], sees: tuple[int, dict]
) -> list[Tensor]:
    """Final hidden state of every slot of one block.

    Args:
        weights: the drafter's, by name.
        sizes: see `Sizes`.
        context: per visible pack row, the normalised context vector [D].
        embeddings: per slot [D].
        sees: position of the anchor, and {(layer, slot): [(row, position), ...]}.
    """
    anchor_position, rows_of = sees
    states = embeddings
    for layer in range(sizes.num_layers):
        prefix = f"layers.{layer}."
        attention = {n: weights[f"{prefix}self_attn.{n}.weight"] for n in ("q_proj", "k_proj", "v_proj", "o_proj")}
        q_norm, k_norm = (weights[f"{prefix}self_attn.{n}_norm.weight"] for n in "qk")
        normed = [norm(s, weights[prefix + "input_layernorm.weight"], sizes.epsilon) for s in states]

        def keys_values(vector: Tensor, position: int, a: Weights = attention, kn: Tensor = k_norm) -> list:
            keys = heads_of(vector, a["k_proj"], sizes.num_kv_heads)
            keys = [turn(norm(k, kn, sizes.epsilon), position, sizes.theta) for k in keys]
            return list(zip(keys, heads_of(vector, a["v_proj"], sizes.num_kv_heads), strict=True))

        own = [keys_values(s, anchor_position + slot) for slot, s in enumerate(normed)]
        places = {place for slot in range(len(states)) for place in rows_of[layer, slot]}
        cached = {row: keys_values(context[row], position) for row, position in places}
        next_states = []
        for slot, state in enumerate(normed):
            visible = [cached[row] for row, _ in rows_of[layer, slot]]
            visible += [own[other] for other in visible_slots(slot, len(states), sizes.windows[layer])]
            outputs = []
            for head, query in enumerate(heads_of(state, attention["q_proj"], sizes.num_heads)):
                query = turn(norm(query, q_norm, sizes.epsilon), anchor_position + slot, sizes.theta)
                group = head * sizes.num_kv_heads // sizes.num_heads
                scores = torch.stack([kv[group][0] for kv in visible]) @ query / math.sqrt(sizes.head_dim)
                outputs.append(torch.softmax(scores, 0) @ torch.stack([kv[group][1] for kv in visible]))
            state = states[slot] + attention["o_proj"] @ torch.cat(outputs)
            inner = norm(state, weights[prefix + "post_attention_layernorm.weight"], sizes.epsilon)
            gate, up, down = (weights[f"{prefix}mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
            gated = gate @ inner
            next_states.append(state + down @ (gated * torch.sigmoid(gated) * (up @ inner)))
        states = next_states
    return [norm(s, weights["norm.weight"], sizes.epsilon) for s in states]


def hidden_of_pack(
    weights: Weights, sizes: Sizes, pack: dict[str, list[int]], features: Tensor, blocks: list[Block], embed: Tensor
) -> list[list[Tensor] | None]:
    """Per block, the hidden states of its slots; None for invalid anchors. `features` [T, n·D], `embed` [V, D]."""
    results: list[list[Tensor] | None] = []
    for block in blocks:
        if block.anchor < 0:
            results.append(None)
            continue
        size = len(block.token_ids)
        rows_of = {
            (layer, slot): [
                (row, pack["position_ids"][row]) for row in visible_rows(pack, block.anchor, slot, sizes.windows[layer])
            ]
            for layer in range(sizes.num_layers)
            for slot in range(size)
        }
        rows = {row for seen in rows_of.values() for row, _ in seen}
        context = {
            row: norm(weights["fc.weight"] @ features[row], weights["hidden_norm.weight"], sizes.epsilon)
            for row in rows
        }
        embeddings = [embed[token] for token in block.token_ids]
        results.append(block_hidden(weights, sizes, context, embeddings, (pack["position_ids"][block.anchor], rows_of)))
    return results


@dataclass(frozen=True)
class ReferenceSums:
    """The sums that the loss under test returns, as tensors or numbers."""

    numerator: Tensor
    weight: float
    correct: list[int]
    count: list[int]
    matched_prefix: int
    blocks: int


def cross_entropies(hidden: list[Tensor], labels: list[int | None], head: Tensor, soft_cap: float | None) -> list:
    """Per slot (cross-entropy, is the label the most likely token), or None where the slot does not count."""
    results: list[tuple[Tensor, bool] | None] = []
    for state, label in zip(hidden, labels, strict=True):
        if label is None:
            results.append(None)
            continue
        logits = head @ state
        if soft_cap is not None:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        results.append((-torch.log_softmax(logits, 0)[label], int(logits.argmax()) == label))
    return results


def slot_weight(scheme: str, parameter: float, slot: int, losses: list[float | None]) -> float:
    """Weight of slot k >= 1 in a block with these detached cross-entropies (None: does not count).

    `parameter` is gamma for "decay" and alpha for "dpace".
    """
    if scheme == "uniform":
        return 1.0
    if scheme == "decay":
        return math.exp(-(slot - 1) / parameter)
    total = 0.0
    for last in range(slot, len(losses)):
        if losses[last] is None:
            continue
        reach = 1.0
        for k in range(1, last + 1):
            value = losses[k]
            if value is not None:
                reach *= (1 - parameter) * math.exp(-value) + parameter
        total += reach
    return total


def loss_of_blocks(
    hidden: list[list[Tensor] | None], blocks: list[Block], head: Tensor, scheme: tuple[str, float, float | None]
) -> ReferenceSums:
    """Sums over blocks. `scheme`: slot weights, their parameter, the logit soft cap."""
    kind, parameter, soft_cap = scheme
    size = len(blocks[0].labels)
    numerator, weight, matched, valid = torch.zeros((), dtype=head.dtype), 0.0, 0, 0
    correct, count = [0] * (size - 1), [0] * (size - 1)
    for states, block in zip(hidden, blocks, strict=True):
        if states is None:
            continue
        valid += 1
        results = cross_entropies(states, block.labels, head, soft_cap)
        losses = [None if r is None else r[0].item() for r in results]
        unbroken = True
        for slot in range(1, size):
            result = results[slot]
            if result is None:
                break
            own_weight = slot_weight(kind, parameter, slot, losses)
            numerator = numerator + own_weight * result[0]
            weight += 1.0 if kind == "dpace" else own_weight
            count[slot - 1] += 1
            correct[slot - 1] += result[1]
            unbroken = unbroken and result[1]
            matched += unbroken
    return ReferenceSums(numerator, weight, correct, count, matched, valid)
