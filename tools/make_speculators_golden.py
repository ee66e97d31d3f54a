"""Write tests/golden/speculators_dflash.{safetensors,json}: a DFlash step as `speculators` 0.9.0 computes it.

Runs in an environment of its own, since speculators pins other versions than Slipstream:

    python3 -m venv golden-env
    golden-env/bin/pip install torch==2.13.0 transformers==5.19.0 safetensors loguru openai datasets pydantic-settings
    golden-env/bin/pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0
    golden-env/bin/python tools/make_speculators_golden.py tests/golden

What is compared, and where the conventions differ:

* Weights, features, tokens and anchors are given to both; hidden states and logits of every slot of every valid anchor
  must agree. Invalid anchors sit on row 0 there and see nothing here: no result of theirs counts on either side.
* Layer numbers are l + 1 there (an index into `hidden_states`); the tensors are the same and so is their order.
* Labels: speculators takes the argmax of the verifier's logits one row earlier, we take the recorded token. The tokens
  here are that argmax, as in text that the target generated greedily, so that both are the same.
* Slots: slot 0 is the anchor and slot k predicts row anchor + k on both sides (`sample_from_anchor` false).
* Counted slots: speculators counts every supervised slot of a block, also past an unsupervised gap and in the next
  document; we stop at the first slot that is not supervised or not in the anchor's document. Case `clean` has no such
  slot (each document begins with unsupervised tokens, as every prompt does), so that losses and gradients must agree.
  Case `gap` has some: hidden states must agree and our counted slots are theirs up to the gap.
* Normalisation: speculators divides the weighted sum by the number of counted slots + 1e-5, we hand out the sum and
  the sum of weights. Compared is the sum.
* Sliding windows differ in definition (there relative to the anchor, W + 1 keys) and are not compared.
"""

import importlib.metadata
import json
import sys
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import save_file
from speculators.losses import resolve_loss_config
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig, core
from speculators.models.dflash.metrics import compute_metrics
from torch import Tensor
from transformers import Qwen3Config

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 61,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "max_position_embeddings": 256,
}
BLOCK_SIZE = 8
TARGET_LAYER_IDS = (1, 4)
MASK_TOKEN = 60
PACK_TOKENS = 96
DOCUMENT_LENGTHS = (30, 41, 17)
PROMPT_TOKENS = BLOCK_SIZE
ANCHORS = {"clean": (9, 14, 21, 27, 40, 52, 63, 68, 81, 84), "gap": (9, 14, 21, 26, 40, 52, 63, 68, 81, 84)}
GAPS = {"clean": (), "gap": (24, 56, 71)}
NUM_INVALID = 2
GAMMA, ALPHA = 4.0, 0.5


def build_model() -> DFlashDraftModel:
    """A drafter with weights large enough that every part matters."""
    layers = Qwen3Config(**SIZES, attention_bias=False, attn_implementation="sdpa")
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layers,
        draft_vocab_size=SIZES["vocab_size"],
        block_size=BLOCK_SIZE,
        aux_hidden_state_layer_ids=[layer + 1 for layer in TARGET_LAYER_IDS],
        mask_token_id=MASK_TOKEN,
    )
    model = DFlashDraftModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.randn(parameter.shape) * 1.5 / parameter.shape[1] ** 0.5)
            else:
                parameter.copy_(torch.rand(parameter.shape) + 0.5)
        model.lm_head.weight.copy_(torch.randn(model.lm_head.weight.shape))
        model.verifier_lm_head.weight.copy_(model.lm_head.weight)
    return model


def build_pack(model: DFlashDraftModel, gaps: tuple[int, ...]) -> dict[str, Tensor]:
    """Documents whose tokens are what the verifier's head finds most likely one row earlier."""
    document_ids = torch.full((PACK_TOKENS,), -1)
    position_ids = torch.zeros(PACK_TOKENS, dtype=torch.long)
    loss_mask = torch.zeros(PACK_TOKENS, dtype=torch.long)
    start = 0
    for index, length in enumerate(DOCUMENT_LENGTHS):
        rows = slice(start, start + length)
        document_ids[rows], position_ids[rows] = index, torch.arange(length)
        loss_mask[start + PROMPT_TOKENS : start + length] = 1
        start += length
    loss_mask[list(gaps)] = 0
    last_hidden = torch.randn(PACK_TOKENS, SIZES["hidden_size"])
    with torch.no_grad():
        likely = model.verifier_lm_head(model.verifier_norm(last_hidden)).argmax(-1)
    return {
        "input_ids": torch.roll(likely, 1),
        "loss_mask": loss_mask,
        "document_ids": document_ids,
        "position_ids": position_ids,
        "features": torch.randn(PACK_TOKENS, len(TARGET_LAYER_IDS) * SIZES["hidden_size"]),
        "last_hidden": last_hidden,
    }


def run_backbone(model: DFlashDraftModel, pack: dict[str, Tensor], anchors: tuple[Tensor, Tensor]) -> tuple:
    """speculators' forward with the given anchors in place of drawn ones."""
    names = ("features", "input_ids", "loss_mask", "last_hidden", "document_ids", "position_ids")
    with mock.patch.object(core, "select_anchors", return_value=anchors):
        return model._backbone_forward(*(pack[name][None] for name in names), max_anchors=len(anchors[0]))


def make_some_slots_right(model: DFlashDraftModel, pack: dict[str, Tensor], anchors: tuple[Tensor, Tensor]) -> None:
    """Let the verifier expect what the drafter says on two rows of three that are no anchor.

    Such a row's token is only a label, so that the drafter's output stays what it is.
    """
    said = run_backbone(model, pack, anchors)[1][0].argmax(-1).view(-1, BLOCK_SIZE)
    positions = anchors[0][anchors[1]].tolist()
    for block, anchor in enumerate(positions):
        for row in range(anchor + 1, anchor + BLOCK_SIZE):
            if row not in positions and row % 3:
                wanted = model.verifier_lm_head.weight[said[block, row - anchor]]
                pack["last_hidden"][row - 1] = (wanted / model.verifier_norm.weight).detach()
    with torch.no_grad():
        likely = model.verifier_lm_head(model.verifier_norm(pack["last_hidden"])).argmax(-1)
    pack["input_ids"] = torch.roll(likely, 1)


def run_case(model: DFlashDraftModel, name: str) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Tensors and loss sums of one case."""
    pack = build_pack(model, GAPS[name])
    positions = torch.tensor(ANCHORS[name] + (0,) * NUM_INVALID)
    valid = torch.arange(len(positions)) < len(ANCHORS[name])
    make_some_slots_right(model, pack, (positions, valid))
    hidden, logits, targets, counted, _ = run_backbone(model, pack, (positions, valid))
    tensors = {key: value for key, value in pack.items() if key != "last_hidden"}
    tensors |= {"anchor_positions": positions, "anchor_valid": valid, "hidden": hidden[0], "logits": logits[0]}
    tensors |= {"labels": targets[0].argmax(-1), "counted": counted[0].bool()}
    sums: dict[str, float] = {"counted_slots": float(counted.sum())}
    for scheme in ("fixed-exp-decay", "dpace"):
        loss, metrics = compute_metrics(
            logits,
            targets,
            counted,
            BLOCK_SIZE,
            gamma=GAMMA,
            loss_config=resolve_loss_config("ce", "eager"),
            per_position_loss_weight=scheme,
            dpace_alpha=ALPHA,
        )
        numerator = loss * (counted.sum() + 1e-5)
        sums[f"{scheme}_numerator"] = numerator.item()
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        gradients = torch.autograd.grad(numerator, list(trained.values()), retain_graph=True)
        if name == "clean" and scheme == "fixed-exp-decay":
            tensors |= {f"gradient.{n}": g for n, g in zip(trained, gradients, strict=True)}
    sums["matched_prefix"] = float(metrics["eal_sum"] - metrics["eal_total"])
    sums["blocks"] = float(metrics["eal_total"])
    return {key: value.detach().clone().contiguous() for key, value in tensors.items()}, sums


def main() -> None:
    """Write both files into the directory named on the command line."""
    directory = Path(sys.argv[1])
    torch.manual_seed(20260206)
    torch.set_num_threads(1)
    model = build_model()
    tensors = {
        f"weights.{name}": parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if name not in ("verifier_lm_head.weight", "verifier_norm.weight")
    }
    record = {
        "made_by": "tools/make_speculators_golden.py",
        "versions": {name: importlib.metadata.version(name) for name in ("speculators", "torch", "transformers")},
        "sizes": SIZES,
        "block_size": BLOCK_SIZE,
        "target_layer_ids": TARGET_LAYER_IDS,
        "mask_token_id": MASK_TOKEN,
        "decay_gamma": GAMMA,
        "dpace_alpha": ALPHA,
        "sums": {},
    }
    for name in ANCHORS:
        case_tensors, record["sums"][name] = run_case(model, name)
        tensors |= {f"{name}.{key}": value for key, value in case_tensors.items()}
    save_file(tensors, directory / "speculators_dflash.safetensors")
    (directory / "speculators_dflash.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
