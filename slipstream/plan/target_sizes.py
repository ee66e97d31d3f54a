"""A target's sizes without loading it: from its config.json, from the header of its GGUF file, or from numbers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.gguf_header import ArrayLength, read_gguf_header
from slipstream.hub_reach import connection_failures, why_unreachable
from slipstream.packaged_model import packaged_copy
from slipstream.plan.sizes import TargetSizes
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import TargetSpec
from slipstream.target_files import is_path, model_error
from slipstream.wire.target_config import TargetConfig

CONFIG = "config.json"
_NUMBERS = (
    "num_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
)
_EXAMPLE = ",".join(f"{name}=…" for name in _NUMBERS)
_LARGEST = 1 << 31


def target_sizes(spec: TargetSpec, given: str | None = None) -> TargetSizes:
    """Find and read them.

    Args:
        spec: of the recipe; its model is a directory, a .gguf file or a hub name. Of a hub model only config.json is
            fetched, where the hub cache does not have it.
        given: instead: a file, a directory, or numbers, `hidden_size=4096,…`.

    Raises:
        SlipstreamError: MODEL_INVALID, there is no such model, or its description lacks something; SPEC_INVALID.
    """
    if given is not None and "=" in given:
        return sizes_of_numbers(given)
    path = _on_disk(given if given is not None else spec.model)
    if path is not None:
        return _sizes_of_file(_file_of(path) if path.is_dir() else path)
    if given is not None:
        raise model_error(
            f"--target-config names {given!r}, which does not exist as a file or directory.",
            f"Name a config.json, a .gguf file or a model directory, or give numbers: {_EXAMPLE}",
        )
    if is_path(spec.model):
        raise model_error(
            f"target.model {spec.model!r} does not exist.", f"Check the path, or give --target-config {_EXAMPLE}"
        )
    return _sizes_of_file(_config_of_hub(spec))


def sizes_at_hand(spec: TargetSpec) -> TargetSizes | None:
    """The same where this machine has the files; None where it has not, or cannot read them. Nothing is asked of a hub,
    and nothing is refused: whoever loads the model says what is wrong with it."""
    path = _on_disk(packaged_copy(spec) or spec.model)
    try:
        if path is None and not is_path(spec.model):
            path = _cached_config(spec)
        return None if path is None else _sizes_of_file(_file_of(path) if path.is_dir() else path)
    except (SlipstreamError, OSError, ValueError):
        return None


def sizes_of_served(served: TargetConfig) -> TargetSizes:
    """Of the model that a target server has loaded, as it says itself."""
    return TargetSizes(**served.model_dump(include=set(_NUMBERS)))


def sizes_of_numbers(text: str) -> TargetSizes:
    """`hidden_size=4096,num_layers=36,…`; heads, head size and tying have the defaults of a config.json.

    Raises:
        SlipstreamError: SPEC_INVALID, naming what is unknown or no number.
    """
    values: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in _NUMBERS:
            raise _numbers_error(f"--target-config: {name!r} is no size of a target.")
        if name == "tie_word_embeddings" and value in ("true", "false"):
            values[name] = value == "true"
        elif value.isdecimal() and len(value) <= len(str(_LARGEST)) and _is_size(int(value)):
            values[name] = int(value)
        else:
            raise _numbers_error(
                f"--target-config: {name} is {value!r}, which is no positive number, or above {_LARGEST}."
            )
    values["num_hidden_layers"] = values.pop("num_layers", None)
    return sizes_of_config({name: value for name, value in values.items() if value is not None}, "--target-config")


def sizes_of_config(config: Mapping[str, Any], where: str) -> TargetSizes:
    """From the keys of a config.json of transformers; those of its text part where it has several.

    Raises:
        SlipstreamError: MODEL_INVALID, naming what is missing.
    """
    text = {**config, **config["text_config"]} if isinstance(config.get("text_config"), Mapping) else config
    needed = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    missing = [name for name in needed if text.get(name) is None]
    if missing:
        raise _no_sizes(f"{where} does not say {', '.join(missing)}.")
    heads = text["num_attention_heads"]
    given = {name: text[name] for name in (*needed, "num_key_value_heads", "head_dim") if text.get(name) is not None}
    wrong = [f"{name} = {_shown(value)}" for name, value in given.items() if not _is_size(value)]
    if wrong:
        raise _no_sizes(f"{where} says {', '.join(wrong)}; expected one number from 1 to {_LARGEST} for all layers.")
    head_dim = given.get("head_dim") or text["hidden_size"] // heads
    if not head_dim:
        raise _no_sizes(f"{where} says hidden_size = {text['hidden_size']} and num_attention_heads = {heads}, no head.")
    # Gemma's configurations leave it out, and mean yes; those of the others, and mean no.
    tied = text.get("tie_word_embeddings", str(text.get("model_type", "")).startswith("gemma"))
    return TargetSizes(
        num_layers=text["num_hidden_layers"],
        hidden_size=text["hidden_size"],
        intermediate_size=text["intermediate_size"],
        num_attention_heads=heads,
        num_key_value_heads=given.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        vocab_size=text["vocab_size"],
        tie_word_embeddings=bool(tied),
    )


def sizes_of_gguf(path: Path) -> TargetSizes:
    """From the header of a GGUF file.

    Raises:
        SlipstreamError: MODEL_INVALID.
    """
    header = read_gguf_header(path)
    kind = header.values.get("general.architecture")
    embedding = header.shapes.get("token_embd.weight", ())
    config = {
        "num_hidden_layers": header.values.get(f"{kind}.block_count"),
        "hidden_size": header.values.get(f"{kind}.embedding_length"),
        "intermediate_size": header.values.get(f"{kind}.feed_forward_length"),
        "num_attention_heads": header.values.get(f"{kind}.attention.head_count"),
        "num_key_value_heads": header.values.get(f"{kind}.attention.head_count_kv"),
        "head_dim": header.values.get(f"{kind}.attention.key_length"),
        "vocab_size": embedding[1] if len(embedding) == 2 else header.values.get(f"{kind}.vocab_size"),
        "tie_word_embeddings": "output.weight" not in header.shapes,
    }
    return sizes_of_config(config, str(path))


def _on_disk(text: str) -> Path | None:
    """The file or directory of this name; None where there is none, or no path can be so."""
    try:
        path = Path(text).expanduser()
        return path if text and (path.is_dir() or path.is_file()) else None
    except (OSError, ValueError, RuntimeError):  # too long, with a zero byte, of a user that there is not
        return None


def _is_size(value: object) -> bool:
    """Neither true, nor the length of a GGUF array."""
    return type(value) is int and 0 < value <= _LARGEST


def _shown(value: object) -> str:
    return f"a list of {int(value)}" if isinstance(value, ArrayLength) else f"{value!r:.40}"


def _no_sizes(message: str) -> SlipstreamError:
    return model_error(message, f"Give the sizes as numbers: --target-config {_EXAMPLE}")


def _file_of(directory: Path) -> Path:
    found = [file for file in (directory / CONFIG, *sorted(directory.glob("*.gguf"))) if file.is_file()]
    if not found:
        raise model_error(
            f"The directory {directory} has neither {CONFIG} nor a .gguf file.", "Name the directory of a model."
        )
    return found[0]


def _sizes_of_file(path: Path) -> TargetSizes:
    with path.open("rb") as file:
        is_gguf = file.read(4) == b"GGUF"
    if is_gguf or path.suffix == ".gguf":
        return sizes_of_gguf(path)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise model_error(f"{path} is not JSON: {error}.", "Name a config.json or a .gguf file.") from error
    if not isinstance(config, dict):
        raise model_error(f"{path} holds no JSON object.", "Name the config.json of a model.")
    return sizes_of_config(config, str(path))


def _config_of_hub(spec: TargetSpec) -> Path:
    # A third of a second, and only for hub names.
    from huggingface_hub import constants, errors, hf_hub_download

    try:
        # Without asking: with no network, the client would try for half a minute before it looks there.
        if (cached := _cached_config(spec)) is not None:
            return cached
        why = None if constants.HF_HUB_OFFLINE else why_unreachable(constants.ENDPOINT)
        if why is not None:
            raise _not_to_be_had(spec, f"{constants.ENDPOINT} cannot be reached: {why}")
        return Path(hf_hub_download(spec.model, CONFIG, revision=spec.revision))
    except (*connection_failures(), errors.HFValidationError) as error:
        raise _not_to_be_had(spec, type(error).__name__) from error


def _cached_config(spec: TargetSpec) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(spec.model, CONFIG, revision=spec.revision)
    return Path(cached) if isinstance(cached, str) else None


def _not_to_be_had(spec: TargetSpec, why: str) -> SlipstreamError:
    return model_error(
        f"target.model {spec.model!r} is no path on this disk, and its {CONFIG} is neither in the hub cache nor to be "
        f"had ({why}).",
        f"Name a config.json, a .gguf file or a model directory with --target-config, or give numbers: {_EXAMPLE}",
    )


def _numbers_error(message: str) -> SlipstreamError:
    return SlipstreamError(message, reason=Reason.SPEC_INVALID, remedy=f"Write --target-config {_EXAMPLE}")
