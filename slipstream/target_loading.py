"""Loads a frozen causal language model with its tokenizer, or says in words why it cannot be used.

torch and transformers are imported when a model is loaded, not with this module.
"""

import importlib.util
import itertools
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from slipstream.errors import SlipstreamError
from slipstream.gguf_reading import gguf_read_once
from slipstream.quantised_target import QuantisedLoading, check_tensors, find_quantisation, plan_loading
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import TargetSpec
from slipstream.target_files import TargetFiles, locate_target, locate_tokenizer, model_error
from slipstream.tensor_parallel import Rank, join_group, sharding_arguments, spread_over

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast


@dataclass(frozen=True)
class LoadedTarget:
    """A target ready for inference: evaluation mode, no gradients, one copy of the weights."""

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerFast"
    files: TargetFiles
    ranks: int = 1
    """Processes that share the model, this one included: every forward needs all of them."""
    quantised: QuantisedLoading | None = None
    """How quantised weights were loaded; None: they are not."""


def load_causal_lm(spec: TargetSpec, device: str, rank: Rank | None = None) -> LoadedTarget:
    """Load the target of a run onto `device` (`cpu`, `cuda` or `cuda:N`) in `spec.dtype`.

    Args:
        spec: which target.
        device: where to.
        rank: of several processes that load one model together; each gets its part.

    Raises:
        SlipstreamError: MODEL_INVALID (files missing or unfit, no fast tokenizer, no chat template, unknown
            architecture), ENVIRONMENT_UNSUPPORTED (no such device, an optional package is missing), OUT_OF_MEMORY.
    """
    import torch

    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise SlipstreamError(
            f"The target was to be loaded onto {device!r}, but torch finds no CUDA device.",
            reason=Reason.ENVIRONMENT_UNSUPPORTED,
            remedy="Use the device cpu, or check the driver and that torch was installed with CUDA.",
        )
    files = locate_target(spec)
    if files.is_gguf:
        _require("gguf", "accelerate", purpose=f"reading {files.weights[0].name}", extra="gguf")
    quantisation = find_quantisation(spec, files)
    loading = None if quantisation is None else plan_loading(quantisation, spec, torch.device(device))
    rank = rank or Rank()
    if rank.count > 1:
        join_group(rank, device)
    with _quiet_transformers(), _alone_and_read_once(files) if files.is_gguf else nullcontext(files.root) as root:
        tokenizer = _load_tokenizer(spec, files, root)
        sharding = sharding_arguments(root, rank, _source(spec, files)) if rank.count > 1 else {}
        with spread_over(torch.device(device)) if sharding else nullcontext():
            model = _load_model(spec, files, root, torch.device(device), sharding, loading)
    decoder_layers(model)
    return LoadedTarget(model.eval().requires_grad_(False), tokenizer, files, rank.count, loading)


def load_tokenizer(spec: TargetSpec) -> "PreTrainedTokenizerFast":
    """The target's tokenizer alone; weights are not read, and not needed unless the target is a GGUF file.

    Raises:
        SlipstreamError: MODEL_INVALID, ENVIRONMENT_UNSUPPORTED, as `load_causal_lm` does.
    """
    files = locate_tokenizer(spec)
    if files.is_gguf:
        _require("gguf", "accelerate", purpose=f"reading {files.weights[0].name}", extra="gguf")
    with _quiet_transformers(), _alone_and_read_once(files) if files.is_gguf else nullcontext(files.root) as root:
        return _load_tokenizer(spec, files, root)


def known_tokens(tokenizer: "PreTrainedTokenizerBase") -> int:
    """One more than the largest token id of the tokenizer; rows of the vocabulary from here on are padding."""
    return max(tokenizer.get_vocab().values()) + 1


def never_choose_padding(target: LoadedTarget) -> None:
    """From now on the model gives rows of the vocabulary that the tokenizer does not know no probability.

    Such a row has no text, and a data file that holds its number is refused. Everyone who decodes calls this, so that
    regenerated answers stay what evaluation decodes. Trained models never come near these rows; tiny ones do.
    """
    from torch import Tensor, nn

    known = known_tokens(target.tokenizer)
    if known >= target.model.get_output_embeddings().weight.shape[0]:
        return

    # On the whole model, not on its head: a soft cap behind the head would make minus infinity finite again.
    def without_padding(_model: nn.Module, _inputs: object, output: Mapping[str, Tensor]) -> None:
        output["logits"][..., known:] = float("-inf")

    target.model.register_forward_hook(without_padding)


def decoder_of(model: "PreTrainedModel") -> "PreTrainedModel":
    """The model without its language-modelling head (`model.model` in most families)."""
    decoder: PreTrainedModel = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    return decoder


def decoder_layers(model: "PreTrainedModel") -> "nn.ModuleList":
    """The decoder layers, in order; layer `l` of a run is `decoder_layers(model)[l]`.

    Raises:
        SlipstreamError: MODEL_INVALID, when the architecture has no list of layers called `layers`.
    """
    from torch import nn

    layers = getattr(decoder_of(model), "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) == 0:
        raise model_error(
            f"The architecture {type(model).__name__} is not supported: its decoder has no list `layers`.",
            "Use a decoder-only model of the Llama kind (Llama, Qwen, Mistral, Gemma, …).",
        )
    return layers


@contextmanager
def _alone_and_read_once(files: TargetFiles) -> Iterator[Path]:
    """A directory that holds only the GGUF file: transformers would prefer tokenizer files that lie beside it."""
    with gguf_read_once(), TemporaryDirectory() as directory:
        link = Path(directory) / files.weights[0].name
        link.symlink_to(files.weights[0].resolve())
        yield link.parent


def _load_tokenizer(spec: TargetSpec, files: TargetFiles, root: Path) -> "PreTrainedTokenizerFast":
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(root, **_source(spec, files))
    except _loading_errors() as error:
        raise _explained("The tokenizer", spec, error) from error
    if not tokenizer.is_fast:
        raise model_error(
            f"The tokenizer of {spec.model!r} is a slow one ({type(tokenizer).__name__}): it cannot say where a token "
            "lies in the text, which exact loss masks need.",
            "Add the tokenizer.json of the model.",
        )
    if not tokenizer.chat_template:
        raise model_error(
            f"The tokenizer of {spec.model!r} has no chat template, so conversations cannot be written for it.",
            "Use the instruct variant of the model, or add its chat_template.jinja to the directory.",
        )
    return tokenizer


def _load_model(
    spec: TargetSpec,
    files: TargetFiles,
    root: Path,
    device: "torch.device",
    sharding: dict[str, Any],
    loading: QuantisedLoading | None,
) -> "PreTrainedModel":
    import torch
    from transformers import AutoModelForCausalLM

    try:
        check_tensors(spec, files, loading)
        arguments = _arguments(spec, files, device, sharding, loading)
        model, report = AutoModelForCausalLM.from_pretrained(
            root, dtype=getattr(torch, spec.dtype), output_loading_info=True, **arguments
        )
        if not sharding:
            _place(model, device)
        if getattr(model, "is_quantized", False):
            _run_once(model)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise SlipstreamError(
            f"The target {spec.model!r} does not fit into the memory of {device} in {spec.dtype}.",
            reason=Reason.OUT_OF_MEMORY,
            remedy="Use a smaller model, a device with more memory, or target.dtype = 'bfloat16'.",
        ) from error
    except _loading_errors() as error:
        explained = _explained("The model", spec, error)
        raise (explained if loading is None else _quantised_error(spec, loading, error, device)) from error
    missing = sorted(report["missing_keys"])
    if missing:
        # transformers would go on with random weights.
        raise model_error(
            f"The weight files of {spec.model!r} lack {len(missing)} tensors that its configuration asks for, "
            f"{missing[0]} first.",
            "Check that config.json and the weights belong together and are complete.",
        )
    return model


def _arguments(
    spec: TargetSpec,
    files: TargetFiles,
    device: "torch.device",
    sharding: dict[str, Any],
    loading: QuantisedLoading | None,
) -> dict[str, Any]:
    """Of from_pretrained, besides the directory and the dtype."""
    arguments = _source(spec, files) | sharding
    arguments |= _gguf_arguments() if files.is_gguf else {"use_safetensors": True}
    if loading is not None:
        arguments |= loading.arguments
    # Some quantisers put a model on a GPU, wherever it was wanted, unless they are told.
    placed = device.type != "cpu" or (loading is not None and loading.why_dequantised is None)
    if placed and not sharding and importlib.util.find_spec("accelerate"):
        # Weights go to the device file by file; without accelerate they pass through a whole copy in host memory.
        arguments["device_map"] = {"": device}
    return arguments


def _place(model: "PreTrainedModel", device: "torch.device") -> None:
    """Onto `device`. A quantised model was loaded there, and may refuse to be moved, so it is only if it has to be.

    Raises:
        ValueError: it is elsewhere and cannot be moved.
    """
    tensors = itertools.chain(model.parameters(), model.buffers())
    if getattr(model, "is_quantized", False) and all(
        tensor.device.type == device.type and device.index in (None, tensor.device.index) for tensor in tensors
    ):
        return
    model.to(device)


def _run_once(model: "PreTrainedModel") -> None:
    """A forward over one token: some quantised layers unpack their weights or load their kernels then.

    Not in inference mode, whose tensors torch.compile only half knows.
    """
    import torch

    with torch.no_grad():
        model(torch.zeros((1, 1), dtype=torch.int64, device=model.device))


def _source(spec: TargetSpec, files: TargetFiles) -> dict[str, Any]:
    """Arguments that are the same for tokenizer and model."""
    arguments: dict[str, Any] = {"trust_remote_code": spec.trust_remote_code, "local_files_only": True}
    return arguments | {"gguf_file": files.weights[0].name} if files.is_gguf else arguments


def _gguf_arguments() -> dict[str, Any]:
    """Newer transformers keep GGUF weights packed unless told otherwise; older ones always unpack them."""
    import transformers

    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def _loading_errors() -> tuple[type[Exception], ...]:
    """What transformers and the readers under it raise on files that they cannot use."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    found_wrong = (LookupError, TypeError, ValueError, AttributeError, RuntimeError, AssertionError, struct.error)
    return (OSError, ImportError, *found_wrong, StrictDataclassError, SafetensorError)


def _require(*modules: str, purpose: str, extra: str) -> None:
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise SlipstreamError(
            f"{purpose[0].upper()}{purpose[1:]} needs the package {' and '.join(missing)}, which is not installed.",
            reason=Reason.ENVIRONMENT_UNSUPPORTED,
            remedy=f'Install the extra: pip install "slipstream[{extra}]"',
        )


def _explained(what: str, spec: TargetSpec, error: Exception) -> SlipstreamError:
    """One sentence out of an exception of transformers."""
    text = str(error)
    if "trust_remote_code" in text:
        return model_error(
            f"{what} of {spec.model!r} needs Python code that ships with it, and target.trust_remote_code is off.",
            "Read that code; if you trust it, set target.trust_remote_code = true.",
        )
    if "does not recognize this architecture" in text or "Unrecognized" in text:
        return model_error(
            f"{what} of {spec.model!r} has an architecture that the installed transformers does not know as a causal "
            f"language model ({_first_line(text)}).",
            "Use a decoder-only language model, or update transformers.",
        )
    return model_error(
        f"{what} of {spec.model!r} could not be loaded: {type(error).__name__}: {_first_line(text)}",
        "Check that the files are complete and belong together.",
    )


def _quantised_error(
    spec: TargetSpec, loading: QuantisedLoading, error: Exception, device: "torch.device"
) -> SlipstreamError:
    found = f"The weights of {spec.model!r} are quantised (quant_method {loading.quantisation.method!r})"
    if isinstance(error, ImportError):
        return SlipstreamError(
            f"{found}, and transformers lacks something to read them: {_first_line(str(error))}",
            reason=Reason.ENVIRONMENT_UNSUPPORTED,
            remedy="Install it, or name the model's unquantised files as target.model.",
        )
    return model_error(
        f"{found}, and could not be loaded onto {device}: {type(error).__name__}: {_first_line(str(error))}",
        "Check that the files are complete and that the method runs on this device, or use the unquantised files.",
    )


def _first_line(text: str, limit: int = 300) -> str:
    line = next((line.strip() for line in text.splitlines() if line.strip()), "no message")
    return line if len(line) <= limit else line[:limit] + "…"


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bars and no load report: what matters in them is raised as an error."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
