"""Tensors of a published drafter: where they lie, and whether they are those that its configuration asks for."""

import json
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from drafter_trainer.drafter_config import DrafterConfig
from drafter_trainer.formats.published_config import PublishedConfig
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason

Shape = tuple[int, ...]

_INDEX = "model.safetensors.index.json"
_SHOWN = 6
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def expected_shapes(config: PublishedConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a drafter."""
    hidden, head, inner = config.hidden_size, config.head_dim, config.intermediate_size
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for number in range(config.num_layers):
        shapes |= {f"layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors of `model.safetensors`, or of the shards that its index names; on the CPU.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID.
    """
    tensors: dict[str, Tensor] = {}
    for path in _weight_files(directory):
        try:
            tensors |= safetensors.torch.load_file(path)
        except OSError as error:
            raise _invalid(f"{path} cannot be read ({error.strerror or error})") from error
        except SafetensorError as error:
            raise _invalid(f"{path} is no whole safetensors file ({error})") from error
    return tensors


def check_tensors(
    tensors: Mapping[str, Tensor], config: PublishedConfig, optional: tuple[str, ...], where: str
) -> None:
    """Compare names, shapes and dtypes with the configuration; every value must be finite.

    Args:
        tensors: of a file, or to be written.
        config: see there.
        optional: copies of the target's tables, [V, D].
        where: they are from, for the error.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID, naming each wrong tensor.
    """
    tables = dict.fromkeys(optional, (config.vocab_size, config.hidden_size))
    check_named_tensors(tensors, expected_shapes(config), tables, where)


def check_parameters(
    weights: Mapping[str, Tensor], config: DrafterConfig, where: str, *, must_be_finite: bool = True
) -> None:
    """Compare the weights of a checkpoint with the parameters that its configuration builds, of any architecture.

    `must_be_finite`: False for a run that goes on, whose own steps say in words that it has blown up, and which.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID, naming each wrong tensor.
    """
    with torch.device("meta"):
        shapes = {name: tuple(parameter.shape) for name, parameter in config.build().named_parameters()}
    check_named_tensors(weights, shapes, {}, where, must_be_finite=must_be_finite)


def check_named_tensors(
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, Shape],
    optional: Mapping[str, Shape],
    where: str,
    *,
    must_be_finite: bool = True,
) -> None:
    """Compare with names, shapes and dtypes.

    Args:
        tensors: of a file, or to be written.
        expected: all that must be there.
        optional: what may be there besides.
        where: they are from, for the error.
        must_be_finite: every value.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID, naming each wrong tensor.
    """
    allowed = {**expected, **optional}
    missing, extra = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - allowed.keys())
    problems = []
    if missing:
        problems.append(f"{len(missing)} tensors are missing ({_some(missing)})")
    if extra:
        problems.append(f"{len(extra)} tensors are not known ({_some(extra)})")
    known = {name: tensor for name, tensor in tensors.items() if name in allowed}
    shapes = [f"{name} is {list(tensor.shape)}, expected {list(allowed[name])}" for name, tensor in known.items()
              if tuple(tensor.shape) != allowed[name]]  # fmt: skip
    types = [f"{name} is {tensor.dtype}, expected float32, bfloat16 or float16" for name, tensor in known.items()
             if tensor.dtype not in _DTYPES]  # fmt: skip
    counts = _not_finite(known) if must_be_finite else {}
    not_finite = [f"{name} holds {count} values that are not finite" for name, count in counts.items()]
    problems += [_some(found, "; ") for found in (shapes, types, not_finite) if found]
    if problems:
        raise _invalid(f"the weights in {where} are not those of their configuration: {'; '.join(problems)}")


def _not_finite(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    # Of other types torch cannot always say it, as of those of eight bits; they are refused anyway.
    counts = {name: int((~torch.isfinite(tensor)).sum()) for name, tensor in tensors.items()
              if tensor.dtype in _DTYPES}  # fmt: skip
    return {name: count for name, count in counts.items() if count}


def _weight_files(directory: Path) -> list[Path]:
    single, index = directory / "model.safetensors", directory / _INDEX
    if single.exists():
        return [single]
    if not index.exists():
        found = ", ".join(sorted(path.name for path in directory.iterdir())[:_SHOWN])
        raise _invalid(f"{directory} holds no weights: expected {single.name} or {_INDEX}, found {found or 'nothing'}")
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise _invalid(f"{index} cannot be understood ({error})") from error
    if not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise _invalid(f"{index} names files that do not lie beside it")
    return sorted(directory / name for name in names)


def _some(names: list[str], separator: str = ", ") -> str:
    shown = separator.join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown}{separator}and {len(names) - _SHOWN} more"


def _invalid(message: str) -> SlipstreamError:
    return SlipstreamError(
        message,
        reason=Reason.CHECKPOINT_INVALID,
        remedy="Use config.json and weights that belong together, complete and undamaged.",
    )
