"""Targets with quantised weights: what their files say of it, what reads them, and what would read them wrong.

transformers does the loading. It says late, or not at all, that it lacks a package or does not know a method, and it
takes some checkpoints apart wrongly in silence; so that is looked for before weights are read. torch and transformers
are imported when a target is loaded, not with this module.
"""

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import TargetSpec
from slipstream.target_files import TargetFiles, model_error

if TYPE_CHECKING:
    import torch

FINE_GRAINED_FP8 = "fp8"
COMPRESSED_TENSORS = "compressed-tensors"
# By quant_method: what transformers imports to read it, and what to install where the name differs. Others it names
# itself, in an ImportError.
_PACKAGES: dict[str, tuple[str, ...]] = {
    "aqlm": ("accelerate", "aqlm"),
    "auto-round": ("auto_round",),
    "awq": ("accelerate", "gptqmodel"),
    "bitnet": ("accelerate",),
    "bitsandbytes": ("accelerate", "bitsandbytes"),
    COMPRESSED_TENSORS: ("compressed_tensors",),
    "eetq": ("accelerate", "kernels"),
    "fbgemm_fp8": ("accelerate", "fbgemm_gpu"),
    FINE_GRAINED_FP8: ("accelerate",),
    "gptq": ("optimum", "gptqmodel"),
    "hqq": ("hqq",),
    "mxfp4": ("accelerate",),
    "mxfp8": ("accelerate",),
    "quanto": ("accelerate", "optimum"),
    "quark": ("quark",),
    "spqr": ("accelerate", "spqr_quant"),
    "torchao": ("torchao",),
    "vptq": ("accelerate", "vptq"),
}
_NAMES_TO_INSTALL = {"auto_round": "auto-round", "compressed_tensors": "compressed-tensors", "quark": "amd-quark"}
_NAMES_TO_INSTALL |= {"fbgemm_gpu": "fbgemm-gpu-genai"}
# As safetensors files name them. Numbers of these kinds mean nothing without their scales.
_FLOATS_OF_A_BYTE = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F4")
_SCALE = "_scale_inv"


@dataclass(frozen=True)
class Quantisation:
    """What config.json says of quantised weights."""

    method: str
    """`quant_method`."""
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class QuantisedLoading:
    """How the weights of a quantised target are loaded."""

    quantisation: Quantisation
    why_dequantised: str | None
    """None: they stay as they are, or what transformers makes of them is its own affair."""
    dtype: str

    def __str__(self) -> str:
        if self.why_dequantised is None:
            return f"{self.quantisation.method}, as transformers computes with it"
        return f"{self.quantisation.method}, dequantised to {self.dtype}: {self.why_dequantised}"

    @property
    def arguments(self) -> dict[str, Any]:
        """Of from_pretrained."""
        if self.why_dequantised is None:
            return {}
        from transformers.quantizers.auto import AutoQuantizationConfig

        # With all settings: transformers takes some of them from here instead of from the file.
        settings = dict(self.quantisation.settings) | {"dequantize": True}
        return {"quantization_config": AutoQuantizationConfig.from_dict(settings)}


def find_quantisation(spec: TargetSpec, files: TargetFiles) -> Quantisation | None:
    """Read it from config.json; None where the weights are as they are, and for a GGUF file. Reads no weights.

    Raises:
        SlipstreamError: ENVIRONMENT_UNSUPPORTED (a package is missing), MODEL_INVALID (config.json names no method).
    """
    if files.is_gguf:
        return None
    try:
        config = json.loads((files.root / "config.json").read_text(encoding="utf-8"))
        text = config.get("text_config") or {}
        settings = config.get("quantization_config") or text.get("quantization_config")
    except (OSError, ValueError, AttributeError):
        return None  # whoever reads all of it says what is wrong
    if not isinstance(settings, dict) or not settings:
        return None
    method = settings.get("quant_method")
    if method is None and (settings.get("load_in_8bit") or settings.get("load_in_4bit")):
        method = "bitsandbytes"
    if not isinstance(method, str):
        raise model_error(
            f"config.json of {spec.model!r} has a quantization_config without a quant_method, so nothing says how to "
            "read the weights.",
            "Use a checkpoint saved by transformers or compressed-tensors, or the model's unquantised files.",
        )
    missing = [name for name in _PACKAGES.get(method, ()) if importlib.util.find_spec(name) is None]
    if missing:
        names = [_NAMES_TO_INSTALL.get(name, name) for name in missing]
        raise SlipstreamError(
            f"The weights of {spec.model!r} are quantised (quant_method {method!r} in config.json), which transformers "
            f"reads with {' and '.join(names)}, not installed here.",
            reason=Reason.ENVIRONMENT_UNSUPPORTED,
            remedy=f"pip install {' '.join(names)}, or name the model's unquantised files as target.model.",
        )
    return Quantisation(method, settings)


def plan_loading(quantisation: Quantisation, spec: TargetSpec, device: "torch.device") -> QuantisedLoading:
    """Decide how the weights are loaded onto `device`.

    Raises:
        SlipstreamError: MODEL_INVALID, the installed transformers does not know the method.
    """
    import transformers
    from transformers.quantizers.auto import AutoHfQuantizer

    settings = dict(quantisation.settings) | {"quant_method": quantisation.method}
    if not AutoHfQuantizer.supports_quant_method(settings):
        # transformers would warn, and take the numbers for the weights.
        raise model_error(
            f"The weights of {spec.model!r} are quantised with {quantisation.method!r}, which the installed "
            f"transformers ({transformers.__version__}) cannot read.",
            "Use a checkpoint in FP8 of transformers or in compressed-tensors, or the model's unquantised files.",
        )
    why = None
    if quantisation.method == FINE_GRAINED_FP8:
        why = _why_dequantised(spec, device)
    elif quantisation.method == COMPRESSED_TENSORS:
        # Its first forward unpacks all layers, and deals them out to every GPU that it sees.
        why = "the package would do so in the first forward, on devices of its own choice"
    return QuantisedLoading(quantisation, why, spec.dtype)


def check_tensors(spec: TargetSpec, files: TargetFiles, loading: QuantisedLoading | None) -> None:
    """Refuse weights that would be read wrong without a word; reads the heads of the files only.

    Raises:
        SlipstreamError: MODEL_INVALID.
        SafetensorError, OSError: a file cannot be read.
    """
    if files.is_gguf:
        return
    shapes, dtypes = _tensors(files)
    if loading is None:
        packed = next((name for name, dtype in dtypes.items() if dtype in _FLOATS_OF_A_BYTE), None)
        if packed is not None:
            raise model_error(
                f"The weights of {spec.model!r} are quantised ({packed} is {dtypes[packed]}), but its config.json has "
                "no quantization_config, so transformers would take the numbers without their scales.",
                "Use a checkpoint whose config.json describes its quantisation, or the model's unquantised files.",
            )
    elif loading.why_dequantised is not None and loading.quantisation.method == FINE_GRAINED_FP8:
        _check_blocks(spec, shapes, loading)


def _why_dequantised(spec: TargetSpec, device: "torch.device") -> str | None:
    """Why FP8 weights are not multiplied as they are; None if they can be."""
    import torch

    if device.type != "cuda":
        return f"on {device.type} nothing multiplies them"
    if torch.cuda.get_device_capability(device) < (8, 9):
        return "the GPU cannot multiply FP8"
    if spec.dtype == "float32":
        return "target.dtype is float32"
    if importlib.util.find_spec("kernels") is None:
        return "the package kernels is not installed"
    try:
        from transformers.integrations.finegrained_fp8 import load_finegrained_fp8_kernel

        # Before the layers are compiled, too: what they find loaded must not change under them.
        load_finegrained_fp8_kernel()
    except Exception as error:  # noqa: BLE001 - whatever the hub or a kernel's code raises, dequantised works
        lines = str(error).strip().splitlines() or [""]
        return f"the kernel for them could not be loaded ({type(error).__name__}: {lines[0][:200]})"
    return None


def _tensors(files: TargetFiles) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Shapes and dtypes by name."""
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    for path in files.weights:
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dictionary
                part = file.get_slice(name)
                shapes[name], dtypes[name] = tuple(part.get_shape()), part.get_dtype()
    return shapes, dtypes


def _check_blocks(spec: TargetSpec, shapes: Mapping[str, tuple[int, ...]], loading: QuantisedLoading) -> None:
    """transformers divides a matrix evenly by its scales, which is wrong where the last block is a smaller one."""
    block = loading.quantisation.settings.get("weight_block_size") or (1, 1)
    for name, shape in shapes.items():
        scales = shapes.get(name + _SCALE, ())
        if len(shape) != 2 or len(scales) != 2:
            continue
        uneven = [size for size, count, edge in zip(shape, scales, block, strict=True) if count > 1 and size % edge]
        if uneven:
            raise model_error(
                f"{name} of {spec.model!r} has {uneven[0]} rows or columns, no multiple of its FP8 blocks "
                f"({block[0]} by {block[1]}); transformers would dequantise it with blocks of another size. It is "
                f"dequantised because {loading.why_dequantised}.",
                "Serve it where FP8 is multiplied as it is, or use the model's unquantised files.",
            )
