"""The drafter's forward: against the dense reference, its cached form, its names, its first weights."""

import dataclasses

import pytest
import torch
from torch import Tensor

from drafter_trainer.anchors import Anchors, build_block_targets, draw_anchors
from drafter_trainer.block_mask import build_block_attention
from drafter_trainer.drafter import DFlashDrafter, initialise_weights
from drafter_trainer.drafter_config import FULL, SLIDING, DrafterConfig
from tests.fakes.dense_reference import Sizes, blocks_of, hidden_of_pack
from tests.fakes.drafter_cases import MASK_TOKEN, VOCAB, anchor_list, as_lists, packed, tiny_config, tiny_drafter


def sizes_of(config: DrafterConfig) -> Sizes:
    windows = tuple(config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types)
    return Sizes(
        config.num_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.rms_norm_eps,
        config.rope_theta,
        windows,
    )


def run(drafter: DFlashDrafter, pack: dict, anchors: Anchors, features: Tensor, embed: Tensor) -> Tensor:
    targets = build_block_targets(
        pack, anchors, block_size=drafter.config.block_size, mask_token_id=drafter.config.mask_token_id
    )
    attention = build_block_attention(drafter.attention_layout("sdpa"), anchors, pack["position_ids"])
    block_embeddings = embed[targets.block_ids.flatten()]
    return drafter(features, block_embeddings, pack["position_ids"], targets.block_positions.flatten(), attention)


def material(config: DrafterConfig, pack_tokens: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    features = torch.randn(pack_tokens, config.num_features * config.hidden_size, generator=generator)
    return features, torch.randn(VOCAB, config.hidden_size, generator=generator)


ALL_FULL = (FULL, FULL)
MIXED = (FULL, SLIDING)
LAYOUTS = [(ALL_FULL, None), (MIXED, 6), ((SLIDING, SLIDING), 6), ((SLIDING, FULL, SLIDING), 3), ((SLIDING,), 1)]
"""Layer types and their window; a window of 3 is shorter than a block, one of 1 sees the slot itself alone."""


def layout_config(block_size: int, types: tuple[str, ...], window: int | None) -> DrafterConfig:
    return dataclasses.replace(tiny_config(block_size), num_layers=len(types), layer_types=types, sliding_window=window)


@pytest.mark.parametrize("block_size", [7, 8, 16])
@pytest.mark.parametrize(("types", "window"), LAYOUTS)
def test_hidden_states_and_gradients_equal_the_dense_reference(
    block_size: int, types: tuple[str, ...], window: int | None
) -> None:
    config = layout_config(block_size, types, window)
    drafter = tiny_drafter(config)
    pack = packed([9, 17, 3], 32, seed=block_size)
    drawn = draw_anchors(pack["loss_mask"], pack["document_ids"], 4, 0, 0)
    anchors = Anchors(drawn.positions, drawn.valid & (torch.arange(4) != 3))
    features, embed = material(config, 32)
    hidden = run(drafter, pack, anchors, features, embed).unflatten(0, (4, block_size))

    weights = {name: p.detach().double().requires_grad_() for name, p in drafter.named_parameters()}
    blocks = blocks_of(as_lists(pack), anchor_list(anchors), block_size, MASK_TOKEN)
    expected = hidden_of_pack(weights, sizes_of(config), as_lists(pack), features.double(), blocks, embed.double())
    direction = torch.randn(block_size, config.hidden_size, generator=torch.Generator().manual_seed(1))
    ours, theirs = torch.zeros(()), torch.zeros((), dtype=torch.float64)
    for i, states in enumerate(expected):
        if states is None:
            assert torch.isfinite(hidden[i]).all()
            continue
        torch.testing.assert_close(hidden[i].double(), torch.stack(states), rtol=2e-4, atol=2e-4)
        ours, theirs = ours + (hidden[i] * direction).sum(), theirs + (torch.stack(states) * direction).sum()
    ours.backward()
    theirs.backward()
    largest = max(weight.grad.norm() for weight in weights.values() if weight.grad is not None)
    for name, parameter in drafter.named_parameters():
        reference = weights[name].grad
        # A window of 1 leaves nothing to choose: no gradient for the context (None) or for what is compared (rounding).
        expected_gradient = torch.zeros_like(weights[name]) if reference is None else reference
        bound = 2e-4 * expected_gradient.norm() + 1e-6 * largest
        assert (parameter.grad - expected_gradient).norm() <= bound, name


@pytest.mark.parametrize(("types", "window"), LAYOUTS)
def test_cached_drafting_along_a_document_equals_the_training_forward(
    types: tuple[str, ...], window: int | None
) -> None:
    config = layout_config(7, types, window)
    drafter = tiny_drafter(config)
    pack = packed([24], 32, supervised=1.0)
    features, embed = material(config, 32)
    anchors = Anchors(torch.tensor([1, 4, 5, 11, 16]), torch.ones(5, dtype=torch.bool))
    with torch.no_grad():
        trained = run(drafter, pack, anchors, features, embed).unflatten(0, (5, 7))
        cache: list[tuple[Tensor, Tensor]] | None = None
        done = 0
        for i, anchor in enumerate(anchors.positions.tolist()):
            fresh = drafter.project_context(features[done:anchor], torch.arange(done, anchor))
            if cache is not None:
                fresh = [
                    (torch.cat((k, new_k), dim=1), torch.cat((v, new_v), dim=1))
                    for (k, v), (new_k, new_v) in zip(cache, fresh, strict=True)
                ]
            cache, done = fresh, anchor
            block = torch.full((7,), MASK_TOKEN)
            block[0] = pack["input_ids"][anchor]
            drafted = drafter.draft(embed[block], torch.arange(anchor, anchor + 7), cache)
            torch.testing.assert_close(drafted, trained[i], rtol=1e-4, atol=1e-5)


def test_a_block_does_not_see_its_anchor_row_other_documents_or_other_blocks() -> None:
    config = tiny_config(7)
    drafter = tiny_drafter(config)
    pack = packed([12, 12], 24, supervised=1.0)
    features, embed = material(config, 24)
    anchors = Anchors(torch.tensor([14, 18]), torch.ones(2, dtype=torch.bool))
    with torch.no_grad():
        before = run(drafter, pack, anchors, features, embed)[:7]
        features[:12] += 1.0
        features[14:] += 1.0
        pack["input_ids"][18] = (pack["input_ids"][18] + 1) % VOCAB
        assert torch.equal(run(drafter, pack, anchors, features, embed)[:7], before)
        features[13] += 1.0
        assert not torch.equal(run(drafter, pack, anchors, features, embed)[:7], before)


def test_only_distances_between_positions_matter() -> None:
    """Rotary angles in float32 stay exact enough far into a document."""
    drafter = tiny_drafter(tiny_config(7))
    features, embed = material(drafter.config, 16)
    block = embed[torch.arange(7)]
    with torch.no_grad():
        near = drafter.draft(block, torch.arange(16, 23), drafter.project_context(features, torch.arange(16)))
        far_context = drafter.project_context(features, torch.arange(16) + 5000)
        far = drafter.draft(block, torch.arange(16, 23) + 5000, far_context)
    torch.testing.assert_close(near, far, rtol=2e-2, atol=2e-2)


def test_parameters_have_the_common_names() -> None:
    names = set(DFlashDrafter(tiny_config(7)).state_dict())
    expected = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    for i in range(2):
        expected |= {f"layers.{i}.{n}.weight" for n in ("input_layernorm", "post_attention_layernorm")}
        expected |= {f"layers.{i}.self_attn.{n}_proj.weight" for n in "qkvo"}
        expected |= {f"layers.{i}.self_attn.{n}_norm.weight" for n in "qk"}
        expected |= {f"layers.{i}.mlp.{n}_proj.weight" for n in ("gate", "up", "down")}
    assert names == expected


def test_first_weights_come_from_the_seed_and_the_target() -> None:
    config = dataclasses.replace(tiny_config(7), hidden_size=64, intermediate_size=256)
    final_norm = torch.rand(64) + 3.0
    first, again, other = (DFlashDrafter(config) for _ in range(3))
    for drafter, seed in ((first, 1), (again, 1), (other, 2)):
        torch.manual_seed(seed + 100 * (drafter is again))
        initialise_weights(drafter, seed, final_norm)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.fc.weight, other.fc.weight)
    assert torch.equal(first.norm.weight, final_norm)
    assert first.fc.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert torch.equal(first.hidden_norm.weight, torch.ones(64))


def test_a_bfloat16_drafter_stays_near_the_float32_one() -> None:
    config = tiny_config(8)
    drafter = tiny_drafter(config)
    pack = packed([20], 32)
    anchors = draw_anchors(pack["loss_mask"], pack["document_ids"], 4, 0, 0)
    features, embed = material(config, 32)
    with torch.no_grad():
        exact = run(drafter, pack, anchors, features, embed)
        reduced = run(drafter.bfloat16(), pack, anchors, features.bfloat16(), embed.bfloat16())
    assert reduced.dtype == torch.bfloat16
    assert (reduced.float() - exact).norm() < 0.05 * exact.norm()


def test_every_slot_depends_on_the_embedding_of_mask() -> None:
    config = tiny_config(7)
    drafter = tiny_drafter(config)
    pack = packed([20], 20)
    anchors = draw_anchors(pack["loss_mask"], pack["document_ids"], 2, 0, 0)
    features, embed = material(config, 20)
    with torch.no_grad():
        before = run(drafter, pack, anchors, features, embed)
        embed[MASK_TOKEN] += 1.0
        assert ((run(drafter, pack, anchors, features, embed) - before).norm(dim=1) > 1e-3).all()
