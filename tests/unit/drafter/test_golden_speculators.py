"""Our drafter, targets and loss against `speculators` 0.9.0; conventions: tools/make_speculators_golden.py."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from drafter_trainer.anchors import Anchors, BlockTargets, build_block_targets
from drafter_trainer.block_mask import build_block_attention
from drafter_trainer.drafter import DFlashDrafter
from drafter_trainer.loss import LossSums, drafter_loss, resolve_loss_config
from slipstream.run_spec.spec import LossSpec
from tests.fakes.drafter_cases import TINY

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
RECORD = json.loads((GOLDEN / "speculators_dflash.json").read_text())
SCHEMES = ["fixed-exp-decay", "dpace"]


def tensors_below(prefix: str) -> dict[str, Tensor]:
    tensors = load_file(GOLDEN / "speculators_dflash.safetensors")
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def build_drafter(weights: dict[str, Tensor]) -> DFlashDrafter:
    sizes = dict(RECORD["sizes"])
    sizes["num_layers"] = sizes.pop("num_hidden_layers")
    config = dataclasses.replace(
        TINY,
        **sizes,
        layer_types=("full_attention",) * sizes["num_layers"],
        block_size=RECORD["block_size"],
        target_layer_ids=tuple(RECORD["target_layer_ids"]),
        mask_token_id=RECORD["mask_token_id"],
    )
    drafter = DFlashDrafter(config)
    drafter.load_state_dict(weights)
    return drafter


@pytest.fixture(params=["clean", "gap"])
def step(request: pytest.FixtureRequest) -> SimpleNamespace:
    """One case, run through our code: golden tensors, drafter, targets, hidden [A·B, D], head."""
    weights, golden = tensors_below("weights."), tensors_below(f"{request.param}.")
    embed, head = weights.pop("embed_tokens.weight"), weights.pop("lm_head.weight")
    drafter = build_drafter(weights)
    anchors = Anchors(golden["anchor_positions"], golden["anchor_valid"])
    targets = build_block_targets(
        golden, anchors, block_size=RECORD["block_size"], mask_token_id=RECORD["mask_token_id"]
    )
    attention = build_block_attention(drafter.attention_layout("sdpa"), anchors, golden["position_ids"])
    hidden = drafter(
        golden["features"],
        embed[targets.block_ids.flatten()],
        golden["position_ids"],
        targets.block_positions.flatten(),
        attention,
    )
    return SimpleNamespace(
        name=request.param,
        golden=golden,
        drafter=drafter,
        targets=targets,
        hidden=hidden,
        head=head,
        rows=golden["anchor_valid"].repeat_interleave(RECORD["block_size"]),
    )


def our_loss(step: SimpleNamespace, scheme: str, targets: BlockTargets) -> LossSums:
    parameters = {
        "fixed-exp-decay": {"slot_weights": "decay", "decay_gamma": RECORD["decay_gamma"]},
        "dpace": {"slot_weights": "dpace", "dpace_alpha": RECORD["dpace_alpha"]},
    }
    config = resolve_loss_config(
        LossSpec(**parameters[scheme]),
        block_size=RECORD["block_size"],
        vocab_size=len(step.head),
        logit_soft_cap=None,
        device=torch.device("cpu"),
    )
    return drafter_loss(step.hidden, step.head, targets, config)


def test_hidden_states_and_logits(step: SimpleNamespace) -> None:
    hidden = step.hidden.detach()
    torch.testing.assert_close(hidden[step.rows], step.golden["hidden"][step.rows], rtol=1e-4, atol=1e-4)
    logits = hidden @ step.head.t()
    torch.testing.assert_close(logits[step.rows], step.golden["logits"][step.rows], rtol=1e-4, atol=5e-4)


def test_labels_and_counted_slots(step: SimpleNamespace) -> None:
    ours, theirs = step.targets.counted, step.golden["counted"].view_as(step.targets.counted)
    assert ours.any()
    assert torch.equal(step.targets.labels[ours], step.golden["labels"].view_as(ours)[ours])
    assert torch.equal(ours, theirs) == (step.name == "clean")
    # Theirs up to the first slot they do not count either; what they count after it can't be accepted.
    unbroken = theirs.clone()
    unbroken[:, 0] = True
    unbroken = unbroken.int().cumprod(dim=1).bool()
    unbroken[:, 0] = False
    assert torch.equal(ours, unbroken)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_loss_sums(step: SimpleNamespace, scheme: str) -> None:
    theirs = step.targets._replace(counted=step.golden["counted"].view_as(step.targets.counted))
    sums, expected = our_loss(step, scheme, theirs), RECORD["sums"][step.name]
    assert sums.numerator.item() == pytest.approx(expected[f"{scheme}_numerator"], rel=1e-5)
    assert sums.slot_count.sum().item() == expected["counted_slots"]
    if step.name == "clean":
        sums = our_loss(step, scheme, step.targets)
        assert sums.numerator.item() == pytest.approx(expected[f"{scheme}_numerator"], rel=1e-5)
        assert sums.matched_prefix.item() == expected["matched_prefix"] > 0
        assert sums.blocks.item() == expected["blocks"]


@pytest.mark.parametrize("step", ["clean"], indirect=True)
def test_gradients(step: SimpleNamespace) -> None:
    our_loss(step, "fixed-exp-decay", step.targets).numerator.backward()
    gradients = {name: p.grad for name, p in step.drafter.named_parameters()}
    expected = {n.removeprefix("gradient."): t for n, t in step.golden.items() if n.startswith("gradient.")}
    assert set(gradients) == set(expected)
    for name, gradient in gradients.items():
        assert gradient is not None
        assert (gradient - expected[name]).norm() < 1e-4 * expected[name].norm(), name
