"""What every side of the training benchmark gets: sizes, weights, packs with their anchors, optimizer settings.

All of it is a function of a size and a seed, drawn on the device; no side can see other data than another.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from benchmarks.target_workload import document_lengths
from drafter_trainer.anchors import Anchors, draw_anchors
from drafter_trainer.block_mask import round_up
from drafter_trainer.drafter import INITIAL_STD, DFlashDrafter
from drafter_trainer.drafter_config import FULL, DFlashConfig
from drafter_trainer.frozen_weights import FrozenWeights
from drafter_trainer.pack_buckets import padded_to
from slipstream.run_spec.spec import RunSpec

LEARNING_RATE = 1e-5
DECAY_GAMMA = 7.0
SUPERVISED_SHARE = 0.6
ROPE_THETA = 1e6
PACKS = 3
"""Held on the device by every side, as a trainer prefetches them."""
MEAN_DOCUMENT = 354
"""Tokens, of the conversations that real lengths are drawn from."""


@dataclass(frozen=True)
class Size:
    """A drafter, its target's tables, and the packs it trains on."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    target_layers: int
    target_layer_ids: tuple[int, ...]
    tied: bool
    tokens: int
    """Of a pack (T); of the longest, where there are several lengths."""
    anchors: int
    block_size: int
    documents: int = 1
    """Per pack, equally long and with equally many anchors, so that a peer without packing can take them as rows."""
    lengths: tuple[int, ...] = ()
    """Pack lengths that come in random order; empty: `tokens` only."""
    layers: int = 5
    real_documents: bool = False
    """Documents as long as real conversations, in random order, as many as fit into `tokens`; `documents` is about how
    many these are. Anchors are shared out by length."""
    batch_rows: int = 0
    """Documents that a peer without packing takes as the padded rows of one batch; 0: all of a pack."""

    @property
    def buckets(self) -> tuple[int, ...]:
        """Lengths that a trainer declares: multiples of an attention tile."""
        return tuple(round_up(length) for length in self.lengths or (self.tokens,))

    @property
    def num_features(self) -> int:
        """Target layers that feed the drafter."""
        return len(self.target_layer_ids)


SIZES = {
    "A": Size(
        "A", 4096, 32, 8, 128, 12288, 151_936, 36, (1, 9, 17, 25, 33), False, tokens=4096, anchors=512, block_size=16
    ),
    "B": Size(
        "B",
        *(5120, 64, 8, 128, 17408, 248_320, 64),
        target_layer_ids=(1, 16, 31, 46, 61),
        tied=False,
        tokens=8192,
        anchors=1024,
        block_size=32,
        documents=2,
        lengths=(770, 2000, 4000, 8192),
    ),
    "C": Size(
        "C",
        *(576, 9, 3, 64, 1536, 49_152, 30),
        target_layer_ids=(1, 8, 14, 20, 27),
        tied=True,
        tokens=8192,
        anchors=1024,
        block_size=16,
        documents=16,
    ),
}
"""A: Qwen3-8B, one conversation of 4096 tokens. A4: the same, four conversations. B: 1024 anchors of 32 slots, four
lengths. C: SmolLM2-135M, packs of its recipe. CR: the same, with documents as long as real ones; CR8: peers take them
in batches of eight, one optimizer step for all."""
SIZES["A4"] = replace(SIZES["A"], name="A4", documents=4)
SIZES["CR"] = replace(SIZES["C"], name="CR", documents=23, real_documents=True)
SIZES["CR8"] = replace(SIZES["CR"], name="CR8", batch_rows=8)
TINY = Size("tiny", 64, 4, 2, 16, 96, 256, 8, (1, 3, 5), False, tokens=256, anchors=16, block_size=4, documents=2)
"""For tests on a CPU."""


@dataclass(frozen=True)
class Batch:
    """Documents as the rows of a padded batch, for peers without packing. R rows, S the longest."""

    input_ids: Tensor
    """int64 [R, S]."""
    features: Tensor
    """[R, S, n·D]."""
    loss_mask: Tensor
    """int64 [R, S]; 0 on padding."""
    anchors: Anchors
    """[R, W]: positions within the document, W the most that a row has."""


@dataclass(frozen=True)
class Pack:
    """One row of packed documents on the device, shaped as a target server sends it."""

    tensors: Mapping[str, Tensor]
    """input_ids, loss_mask, document_ids, position_ids [T], and with split features those, [T, D] each."""
    features: Tensor | None
    """[T, n·D]: features concatenated, as peers take them; None where they are split."""
    anchors: Anchors
    batches: tuple[Batch, ...] = ()
    """The same documents with padding; none where features are split."""


def drafter_config(size: Size) -> DFlashConfig:
    """The drafter of a size."""
    return DFlashConfig(
        target_model_type="qwen3",
        num_target_layers=size.target_layers,
        target_layer_ids=size.target_layer_ids,
        vocab_size=size.vocab,
        mask_token_id=size.vocab - 1,
        embedding_scale=1.0,
        logit_soft_cap=None,
        block_size=size.block_size,
        hidden_size=size.hidden,
        num_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        intermediate_size=size.intermediate,
        rms_norm_eps=1e-6,
        rope_theta=ROPE_THETA,
        max_position_embeddings=40_960,
        layer_types=(FULL,) * size.layers,
        sliding_window=None,
    )


def run_spec(size: Size, device: torch.device, **train: object) -> RunSpec:
    """The recipe of a size; `train` adds keys to its [train] table."""
    cuda = device.type == "cuda"
    return RunSpec.model_validate(
        {
            "name": f"bench-{size.name.lower()}",
            "target": {"model": "random-weights"},
            "data": {"files": ["random-packs"], "pack_tokens": round_up(size.tokens)},
            "drafter": {"num_layers": size.layers, "block_size": size.block_size, "mask_token_id": size.vocab - 1},
            "loss": {"slot_weights": "decay", "decay_gamma": DECAY_GAMMA},
            "optimizer": {"kind": "adamw", "learning_rate": LEARNING_RATE},
            "train": {
                "device": device.type,
                "precision": "bfloat16" if cuda else "float32",
                "attention": "flex" if cuda else "sdpa",
                "anchors_per_pack": size.anchors,
                "max_steps": 1_000_000,
                **train,
            },
        }
    )


def compute_dtype(device: torch.device) -> torch.dtype:
    """bf16 on a GPU; float32 on a CPU, where tests compare losses."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def frozen_weights(size: Size, device: torch.device) -> FrozenWeights:
    """Random embedding and head, a final norm of ones."""
    generator = torch.Generator(device).manual_seed(1)

    def table() -> Tensor:
        drawn = torch.empty(size.vocab, size.hidden, device=device, dtype=compute_dtype(device))
        return drawn.normal_(0.0, INITIAL_STD, generator=generator)

    embedding = table()
    head = embedding if size.tied else table()
    return FrozenWeights(embedding, head, torch.ones(size.hidden, device=device), 1.0)


def certain_states(pack: Pack, frozen: FrozenWeights) -> Tensor:
    """Last hidden states [T, D] of a target whose most likely next token is the recorded one.

    Speculators takes its labels from them; so they are the tokens that all others take from the pack.
    """
    following = pack.tensors["input_ids"].long().roll(-1)
    return frozen.head[following]


def drafter_weights(size: Size, device: torch.device) -> dict[str, Tensor]:
    """Float32 weights by name, the names that all sides use: matrices normal(0, 0.02), norms one."""
    with torch.device("meta"):
        shapes = {name: parameter.shape for name, parameter in DFlashDrafter(drafter_config(size)).named_parameters()}
    generator = torch.Generator(device).manual_seed(2)
    weights = {}
    for name, shape in sorted(shapes.items()):
        empty = torch.empty(shape, device=device)
        weights[name] = empty.normal_(0.0, INITIAL_STD, generator=generator) if len(shape) == 2 else empty.fill_(1.0)
    return weights


def make_pack(
    size: Size, device: torch.device, number: int, *, split_features: bool, tokens: int | None = None
) -> Pack:
    """Pack `number` of a size: documents of turns, random tokens, random features.

    An unsupervised turn is at least a block long, so that no block reaches from one answer into the next: then all
    sides count the same slots, whether or not they look at gaps. Split features are padded to a bucket, as a trainer
    pads what it is sent.
    """
    tokens = tokens or size.tokens
    rng = np.random.default_rng((number, tokens))
    lengths = _lengths(size, tokens, number)
    tokens = sum(lengths)
    rows = {
        "input_ids": torch.from_numpy(rng.integers(0, size.vocab - 1, tokens)).int(),
        "loss_mask": torch.cat([_turns(rng, length, size.block_size) for length in lengths]).to(torch.uint8),
        "document_ids": torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int(),
        "position_ids": torch.cat([torch.arange(length) for length in lengths]).int(),
    }
    anchors = _draw(size, rows, lengths, number)
    generator = torch.Generator(device).manual_seed(number)
    features = torch.empty(tokens, size.num_features * size.hidden, device=device, dtype=compute_dtype(device))
    features.normal_(generator=generator)
    tensors = {name: tensor.to(device) for name, tensor in rows.items()}
    if not split_features:
        return Pack(tensors, features, anchors.to(device), tuple(_batches(size, tensors, features, anchors, lengths)))
    parts = features.split(size.hidden, dim=1)
    tensors |= {name: part.contiguous() for name, part in zip(drafter_config(size).feature_names, parts, strict=True)}
    return Pack(padded_to(tensors, round_up(size.tokens if size.real_documents else tokens)), None, anchors.to(device))


def mean_tokens(size: Size) -> float:
    """Of the packs that every side holds, padding left out."""
    return sum(sum(_lengths(size, size.tokens, number)) for number in range(PACKS)) / PACKS


def _lengths(size: Size, tokens: int, number: int) -> list[int]:
    """Of a pack's documents: equal but for the last, or drawn until the next would not fit."""
    if not size.real_documents:
        length = -(-tokens // size.documents)
        return [min(length, tokens - start) for start in range(0, tokens, length)]
    drawn = document_lengths(tokens // MEAN_DOCUMENT * 4, seed=number).tolist()
    fitting = itertools.takewhile(lambda pair: pair[1] <= tokens, zip(drawn, itertools.accumulate(drawn), strict=True))
    return [length for length, _ in fitting]


def _turns(rng: np.random.Generator, length: int, block_size: int) -> Tensor:
    """bool [length]: unsupervised and supervised turns in alternation."""
    mask = torch.zeros(length, dtype=torch.bool)
    position = 0
    while position < length:
        prompt = int(rng.integers(block_size, 4 * block_size))
        answer = round(prompt * SUPERVISED_SHARE / (1 - SUPERVISED_SHARE))
        mask[position + prompt : position + prompt + answer] = True
        position += prompt + answer
    return mask


def _draw(size: Size, rows: Mapping[str, Tensor], lengths: Sequence[int], number: int) -> Anchors:
    """Anchors by the length of a document, none in its last block: speculators indexes all slots of a block."""
    if size.lengths:
        return draw_anchors(rows["loss_mask"], rows["document_ids"], size.anchors, 0, number)
    drawn, start = [], 0
    for document, length in enumerate(lengths):
        part = slice(start, start + length)
        candidates = rows["loss_mask"][part].clone()
        candidates[-size.block_size :] = 0
        wanted = size.anchors * length // size.tokens
        one = draw_anchors(candidates, rows["document_ids"][part], wanted, 0, number * len(lengths) + document)
        drawn.append(one.positions[one.valid] + start)
        start += length
    positions = torch.cat(drawn)
    padding = size.anchors - len(positions)
    return Anchors(functional.pad(positions, (0, padding)), torch.arange(size.anchors) < len(positions))


def _batches(
    size: Size, tensors: Mapping[str, Tensor], features: Tensor, anchors: Anchors, lengths: Sequence[int]
) -> Iterator[Batch]:
    """A pack's documents as padded batches. `anchors` are in host memory."""
    starts = [0, *itertools.accumulate(lengths)]
    positions = anchors.positions[anchors.valid]
    rows_at_once = size.batch_rows or len(lengths)
    for first in range(0, len(lengths), rows_at_once):
        documents = range(first, min(first + rows_at_once, len(lengths)))
        parts = [slice(starts[document], starts[document + 1]) for document in documents]
        own = [positions[(positions >= part.start) & (positions < part.stop)] - part.start for part in parts]
        valid = pad_sequence([torch.ones_like(row, dtype=torch.bool) for row in own], batch_first=True)
        rows = Anchors(pad_sequence(own, batch_first=True), valid)
        yield Batch(
            _padded(tensors["input_ids"].long(), parts),
            _padded(features, parts),
            _padded(tensors["loss_mask"].long(), parts),
            rows.to(features.device),
        )


def _padded(row: Tensor, parts: Sequence[slice]) -> Tensor:
    """Parts of a row [T, ...] below one another, zeros after the shorter ones."""
    return pad_sequence([row[part] for part in parts], batch_first=True)
