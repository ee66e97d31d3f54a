"""Drafters that `speculators` and `specforge` wrote, and ours as speculators loads it: tools/make_formats_golden.py."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from drafter_trainer.drafter_config import DrafterConfig
from drafter_trainer.formats.drafter_format import Verifier, same_bits
from drafter_trainer.formats.module import as_module
from drafter_trainer.formats.published import FORMATS, read_published
from drafter_trainer.formats.published_config import PublishedConfig
from drafter_trainer.formats.self_test import compare_forward, our_hidden
from tests.fakes.exports import drawn_weights, exportable_config
from tests.fakes.tiny_run import write_target

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "formats"
RECORD = json.loads((GOLDEN / "record.json").read_text())
CONFIG = exportable_config(num_layers=1, layer_types=("full_attention",))
VERIFIER = Verifier("tiny-target", ("LlamaForCausalLM",))


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    return load_file(GOLDEN / "expected.safetensors")


def golden_weights() -> dict[str, Tensor]:
    return drawn_weights(CONFIG, seed=RECORD["weights_seed"])


def hidden_and_logits(
    weights: dict[str, Tensor], config: DrafterConfig, given: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Of slots 1 … B - 1 of the two blocks, by our drafter: [2, B - 1, D], [2, B - 1, V]."""
    drafter = as_module(config, weights).eval()
    blocks = []
    for anchor in RECORD["anchors"]:
        block = torch.full((config.block_size,), config.mask_token_id)
        block[0] = given["tokens"][anchor]
        with torch.inference_mode():
            blocks.append(our_hidden(drafter, given["embedding"][block], given["features"][:anchor]))
    hidden = torch.stack(blocks)
    return hidden, hidden @ given["head"].t()


@pytest.mark.parametrize(("name", "format_name"), [("speculators", "vllm"), ("specforge", "sglang")])
def test_we_read_what_they_wrote(name: str, format_name: str, expected: dict[str, Tensor]) -> None:
    found = read_published(GOLDEN / name)
    assert found.format_name == format_name
    assert found.config.target_layer_ids == (1, 2) and found.config.mask_token_id == 384
    weights = golden_weights()
    assert all(same_bits(found.weights[key], tensor) for key, tensor in weights.items())
    hidden, logits = hidden_and_logits(found.weights, CONFIG, expected)
    torch.testing.assert_close(hidden, expected[f"{name}.hidden"][:, 1:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits, expected[f"{name}.logits"][:, 1:], rtol=1e-4, atol=1e-4)
    assert compare_forward(GOLDEN / name, as_module(CONFIG, found.weights)) < 1e-5


def test_speculators_found_our_logits_in_our_export(expected: dict[str, Tensor], tmp_path: Path) -> None:
    """The very files that it loaded are what the exporter writes today."""
    weights = golden_weights()
    FORMATS["vllm"].write(tmp_path, PublishedConfig.of(CONFIG), weights, VERIFIER)
    assert (tmp_path / "config.json").read_text() == (GOLDEN / "ours" / "config.json").read_text()
    hidden, logits = hidden_and_logits(weights, CONFIG, expected)
    torch.testing.assert_close(hidden, expected["ours.hidden"][:, 1:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits, expected["ours.logits"][:, 1:], rtol=1e-4, atol=1e-4)


def test_our_config_has_the_keys_of_theirs() -> None:
    """But for what only transformers adds."""
    theirs, ours = (json.loads((GOLDEN / name / "config.json").read_text()) for name in ("speculators", "ours"))
    assert theirs.keys() - ours.keys() == {"auto_map", "transformers_version"}
    assert not ours.keys() - theirs.keys()
    inner = "transformer_layer_config"
    assert theirs[inner].keys() - ours[inner].keys() == {"transformers_version"}
    assert not ours[inner].keys() - theirs[inner].keys()
    assert ours["speculators_config"] == theirs["speculators_config"]


def test_speculators_loads_our_export(
    expected: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the package is there, now; else the golden files of the tests above stand for it."""
    dflash = pytest.importorskip(
        "speculators.models.dflash", reason="speculators is not installed (see tools/make_formats_golden.py)"
    )
    monkeypatch.chdir(tmp_path)
    write_target(Path("tiny-target"))
    Path("export").mkdir()
    FORMATS["vllm"].write(Path("export"), PublishedConfig.of(CONFIG), golden_weights(), VERIFIER)
    config = dflash.DFlashSpeculatorConfig.from_pretrained("export")
    config.transformer_layer_config._attn_implementation = "sdpa"
    model = dflash.DFlashDraftModel.from_pretrained("export", config=config)
    loaded = {name: parameter for name, parameter in model.named_parameters() if name in golden_weights()}
    assert all(same_bits(loaded[key], tensor) for key, tensor in golden_weights().items())
    # And back: what it saves of it is ours again.
    model.save_pretrained("again")
    again = read_published(Path("again"))
    assert again.config == read_published(Path("export")).config
    assert all(same_bits(again.weights[key], tensor) for key, tensor in golden_weights().items())
