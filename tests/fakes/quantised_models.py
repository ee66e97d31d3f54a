"""Tiny checkpoints turned into quantised ones, as people publish them: packed weights, scales, config.json."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FP8_LARGEST = torch.finfo(torch.float8_e4m3fn).max
BLOCK = 128


def quantise_to_fp8(directory: Path, block: int = BLOCK) -> dict[str, Tensor]:
    """Rewrite the model as fine-grained FP8: one scale for each block of each layer's matrices, the rest in bfloat16.

    Returns the weights that it stands for, by name, in float32. Blocks at the edge are smaller where sizes do not
    divide, as in published files.
    """
    settings = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [block, block],
        "modules_to_not_convert": ["lm_head"],
    }

    def pack(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        rows, columns = weight.shape
        by_row, by_column = torch.arange(rows) // block, torch.arange(columns) // block
        largest = torch.zeros(int(by_row[-1]) + 1, int(by_column[-1]) + 1)
        for i in range(largest.shape[0]):
            for j in range(largest.shape[1]):
                part = weight[i * block : (i + 1) * block, j * block : (j + 1) * block]
                largest[i, j] = part.abs().max()
        scale = largest / FP8_LARGEST
        spread = scale[by_row][:, by_column]
        packed = (weight / spread).to(torch.float8_e4m3fn)
        return {name: packed, f"{name}_scale_inv": scale}, packed.float() * spread

    return _rewrite(directory, settings, pack)


def quantise_to_compressed_tensors(directory: Path, *, activations: bool) -> dict[str, Tensor]:
    """The same as compressed-tensors' FP8: one scale for each row; activations may be rounded, too, token by token."""
    number: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": number | {"strategy": "channel", "dynamic": False},
        "input_activations": number | {"strategy": "token", "dynamic": True} if activations else None,
    }
    settings = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }

    def pack(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        scale = weight.abs().amax(dim=1, keepdim=True) / FP8_LARGEST
        packed = (weight / scale).to(torch.float8_e4m3fn)
        return {name: packed, f"{name}_scale": scale}, packed.float() * scale

    return _rewrite(directory, settings, pack)


def quantise_with_torchao(directory: Path) -> None:
    """Rewrite the model as torchao's int8 weights, by transformers itself. Needs the package torchao."""
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import AutoModelForCausalLM, TorchAoConfig

    method = TorchAoConfig(Int8WeightOnlyConfig())
    AutoModelForCausalLM.from_pretrained(directory, quantization_config=method).save_pretrained(directory)


def edit_quantisation(directory: Path, settings: dict[str, Any] | None) -> None:
    """Put `settings` into config.json as its quantization_config; None takes it out."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    config.pop("quantization_config", None)
    file.write_text(json.dumps(config if settings is None else config | {"quantization_config": settings}))


def _rewrite(
    directory: Path, settings: dict[str, Any], pack: Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]
) -> dict[str, Tensor]:
    written: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, weight in load_file(directory / "model.safetensors").items():
        # A router stays as it is, as everywhere.
        if ".layers." in name and weight.dim() == 2 and not name.endswith(".gate.weight"):
            packed, meant[name] = pack(name, weight.float())
            written |= packed
        else:
            written[name] = weight.to(torch.bfloat16)
            meant[name] = written[name].float()
    save_file(written, directory / "model.safetensors", metadata={"format": "pt"})
    edit_quantisation(directory, settings)
    return meant
