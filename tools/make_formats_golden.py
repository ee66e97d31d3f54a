"""Write tests/golden/formats: drafters as `speculators` 0.9.0 and `specforge` 0.2.0 save them, and what they compute.

Both pin other versions than Slipstream, so they are laid over its environment without their dependencies:

    pip install --no-deps --target over speculators==0.9.0 hs-connectors==0.9.0 specforge==0.2.0 loguru openai \\
        datasets pydantic-settings sniffio distro jiter multiprocess dill xxhash pandas python-dateutil pytz six tzdata
    PYTHONPATH=over:. python tools/make_formats_golden.py tests/golden/formats

* `speculators/`: written by `DFlashDraftModel.save_pretrained` after `from_training_args` on the tests' tiny target.
* `specforge/`: written by `specforge.export.to_hf`, from a checkpoint with those weights (bfloat16, as it does).
* `ours/config.json`: our vLLM export of those weights, which `DFlashDraftModel.from_pretrained` has loaded here; a test
  asks that the exporter still writes this very file.
* `expected.safetensors`: features, tokens, and the hidden states and logits of two blocks: `speculators.*` of their own
  files, `ours.*` of ours as speculators loads them, `specforge.*`. The head and the embedding are the target's.
"""

import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from specforge.export.to_hf import export_to_hf
from specforge.modeling.draft.dflash import DFlashDraftModel as SpecForgeDraftModel
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig, core
from torch import Tensor
from transformers import Qwen3Config

from drafter_trainer.formats.drafter_format import Verifier
from drafter_trainer.formats.published import FORMATS
from drafter_trainer.formats.published_config import PublishedConfig, qwen3_fields
from tests.fakes.exports import drawn_weights, exportable_config
from tests.fakes.tiny_run import write_target

TARGET = "tiny-target"
LENGTH = 24
ANCHORS = (7, 16)


def load_with_speculators(directory: str) -> DFlashDraftModel:
    """As its own code does, but with an attention that a CPU runs at once."""
    config = DFlashSpeculatorConfig.from_pretrained(directory)
    config.transformer_layer_config._attn_implementation = "sdpa"
    return DFlashDraftModel.from_pretrained(directory, config=config).eval()


def run_speculators(model: DFlashDraftModel, features: Tensor, tokens: Tensor) -> dict[str, Tensor]:
    """Hidden states [A, B, D] and logits [A, B, V] of the blocks behind ANCHORS, one document."""
    anchors = torch.tensor(ANCHORS), torch.ones(len(ANCHORS), dtype=torch.bool)
    last_hidden, ones = torch.zeros(LENGTH, 64), torch.ones(LENGTH, dtype=torch.long)
    pack = (features, tokens, ones, last_hidden, ones * 0, torch.arange(LENGTH))
    with torch.no_grad(), mock.patch.object(core, "select_anchors", return_value=anchors):
        hidden, logits, *_ = model._backbone_forward(*(tensor[None] for tensor in pack), max_anchors=len(ANCHORS))
    shape = (len(ANCHORS), model.block_size, -1)
    return {"hidden": hidden[0].view(shape), "logits": logits[0].view(shape)}


def run_specforge(directory: str, features: Tensor, tokens: Tensor, tables: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same with the model of SpecForge, block by block, in float32."""
    model = SpecForgeDraftModel.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa").eval()
    blocks = []
    for anchor in ANCHORS:
        block = torch.full((model.block_size,), model.mask_token_id)
        block[0] = tokens[anchor]
        positions = torch.arange(anchor + model.block_size)[None]
        with torch.no_grad():
            hidden = model(
                position_ids=positions,
                noise_embedding=tables["model.embed_tokens.weight"][block][None],
                target_hidden=features[None, :anchor],
            )
        blocks.append(hidden[0])
    hidden = torch.stack(blocks)
    return {"hidden": hidden, "logits": hidden @ tables["lm_head.weight"].t()}


def write_specforge(config_file: Path, weights: dict[str, Tensor], output: str) -> None:
    """Through its exporter, from a checkpoint in the layout of its trainer."""
    Path("state").mkdir()
    torch.save({"draft_state_dict": weights, "strategy": "dflash"}, "state/training_state.pt")
    export_to_hf("state", str(config_file), output)


def main() -> None:
    """Write everything into the directory named on the command line."""
    golden = Path(sys.argv[1]).absolute()
    torch.set_num_threads(1)
    os.chdir(tempfile.mkdtemp())
    write_target(Path(TARGET))
    tables = load_file(f"{TARGET}/model.safetensors")
    config = exportable_config(num_layers=1, layer_types=("full_attention",))
    weights = drawn_weights(config, seed=11)
    generator = torch.Generator().manual_seed(12)
    features = torch.randn(LENGTH, 2 * 64, generator=generator)
    tokens = torch.randint(0, 384, (LENGTH,), generator=generator)
    published = PublishedConfig.of(config)

    flat = FORMATS["sglang"].config_json(published, Verifier(TARGET, ()), torch.float32)
    theirs = DFlashDraftModel.from_training_args(
        Qwen3Config(**qwen3_fields(published)), verifier_name_or_path=TARGET, draft_vocab_size=config.vocab_size,
        block_size=4, target_layer_ids=[2, 3], mask_token_id=config.mask_token_id, draft_attn_impl="sdpa",
    )  # fmt: skip
    theirs.load_state_dict(weights, strict=False)
    theirs.save_pretrained("speculators")
    Path("ours").mkdir()
    FORMATS["vllm"].write(Path("ours"), published, weights, Verifier(TARGET, ("LlamaForCausalLM",)))
    Path("draft.json").write_text(json.dumps(flat))
    write_specforge(Path("draft.json"), weights, "specforge")

    results = {name: run_speculators(load_with_speculators(name), features, tokens) for name in ("speculators", "ours")}
    results["specforge"] = run_specforge("specforge", features, tokens, tables)
    expected = {f"{name}.{key}": value.contiguous() for name, found in results.items() for key, value in found.items()}
    expected |= {"features": features, "tokens": tokens}
    expected |= {"embedding": tables["model.embed_tokens.weight"], "head": tables["lm_head.weight"]}
    shutil.rmtree(golden, ignore_errors=True)
    for name, files in {"speculators": None, "specforge": None, "ours": ("config.json",)}.items():
        (golden / name).mkdir(parents=True)
        for file in files or ("config.json", "model.safetensors"):
            shutil.copy(Path(name) / file, golden / name / file)
    save_file(expected, golden / "expected.safetensors")
    versions = {
        name: importlib.metadata.version(name) for name in ("speculators", "specforge", "torch", "transformers")
    }
    record = {"made_by": "tools/make_formats_golden.py", "versions": versions, "anchors": ANCHORS, "weights_seed": 11}
    (golden / "record.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
