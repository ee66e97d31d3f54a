"""What a drafter must know of the target, read from the loaded model and checked against what the model computes.

Families differ in places that no configuration field names reliably: Gemma scales embeddings and stores norm weights
minus one, others multiply logits. So each fact is a guess that must reproduce the model's own numbers on a few tokens;
a model that cannot be reproduced is refused, instead of training a drafter that will never be accepted.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from slipstream.target_files import model_error
from slipstream.target_loading import decoder_layers, decoder_of
from slipstream.wire.target_config import TargetConfig

_FINAL_NORM_NAMES = ("norm", "final_layernorm", "final_norm")
_PROBE_TOKENS = 8
_PROBE_ROWS = 4096
# Largest difference relative to the largest value, where both sides should be equal up to rounding.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
# Kinds of rotary embedding whose frequencies depend on the longest document around: only right below this length.
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True)
class _Probe:
    """What the model computed for a few tokens; float32."""

    token_ids: Tensor
    """int64 [n]"""
    first_input: Tensor
    """[n, D], into the first decoder layer."""
    last_output: Tensor
    """[n, D], out of the last one."""
    normalised: Tensor
    """[n, D], after the final norm."""
    logits: Tensor
    """[n, V]"""


@dataclass(frozen=True)
class TargetFacts:
    """Facts in agreement with the model's own computation."""

    config: TargetConfig
    max_document_tokens: int
    """Longest document for which positions are right."""


def read_target_facts(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> TargetFacts:
    """Read and check; the model must still have its own attention.

    Raises:
        SlipstreamError: MODEL_INVALID, naming the part of the architecture that Slipstream does not reproduce.
    """
    settings = model.config.get_text_config()
    embedding, head, norm = model.get_input_embeddings(), model.get_output_embeddings(), _final_norm(model)
    for part, module in (("embedding", embedding), ("head", head), ("final norm", norm)):
        _check_plain(part, module)
    _check_shapes(embedding, head, len(tokenizer))
    probe = _run_probe(model, norm)
    tolerance = _TOLERANCE[model.dtype]
    epsilon = settings.rms_norm_eps
    scale = _embedding_scale(model, probe, tolerance)
    offset = _norm_offset(_matrix(norm), epsilon, probe, tolerance)
    soft_cap = getattr(settings, "final_logit_softcapping", None)
    _check_logits(_matrix(head), soft_cap, probe, tolerance)
    tied = _matrix(head).data_ptr() == _matrix(embedding).data_ptr()
    heads = settings.num_attention_heads
    config = TargetConfig(
        model_type=settings.model_type,
        num_layers=len(decoder_layers(model)),
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=getattr(settings, "num_key_value_heads", None) or heads,
        head_dim=getattr(settings, "head_dim", None) or settings.hidden_size // heads,
        vocab_size=_matrix(embedding).shape[0],
        rms_norm_eps=epsilon,
        rope_theta=_rope(settings)["rope_theta"],
        max_position_embeddings=settings.max_position_embeddings,
        tie_word_embeddings=tied,
        embedding_scale=scale,
        logit_soft_cap=soft_cap,
        norm_weight_offset=offset,
        tokenizer_length=len(tokenizer),
        mask_token_id=tokenizer.mask_token_id,
        special_tokens={token.content: token_id for token_id, token in tokenizer.added_tokens_decoder.items()},
    )
    return TargetFacts(config, _longest_document(settings))


def read_frozen_weights(model: PreTrainedModel, config: TargetConfig) -> dict[str, Tensor]:
    """Embedding and head `[V, D]` and final norm `[D]`, in host memory, in the target's dtype; no head when tied.

    The norm's offset is already added. On a CPU the matrices are the model's own, not copies.
    """
    weights = {
        "embed_tokens.weight": _matrix(model.get_input_embeddings()),
        "norm.weight": _add_offset(_matrix(_final_norm(model)), config.norm_weight_offset),
    }
    if not config.tie_word_embeddings:
        weights["lm_head.weight"] = _matrix(model.get_output_embeddings())
    return {name: weight.detach().cpu().contiguous() for name, weight in weights.items()}


def _matrix(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


def _final_norm(model: PreTrainedModel) -> nn.Module:
    decoder = decoder_of(model)
    norms = (getattr(decoder, name, None) for name in _FINAL_NORM_NAMES)
    norm = next((norm for norm in norms if isinstance(norm, nn.Module)), None)
    weight = getattr(norm, "weight", None)
    has_epsilon = hasattr(model.config.get_text_config(), "rms_norm_eps")
    if norm is None or weight is None or getattr(norm, "bias", None) is not None or not has_epsilon:
        raise model_error(
            f"The architecture {type(model).__name__} does not end in an RMS norm with a weight, which drafters need.",
            "Use a target of the Llama kind (Llama, Qwen, Mistral, Gemma, …).",
        )
    return norm


def _check_plain(part: str, module: nn.Module | None) -> None:
    """Quantised layers are the target's affair; these three a drafter computes with."""
    if module is None:
        return
    weight = getattr(module, "weight", None)
    plain = type(weight) in (Tensor, nn.Parameter) or isinstance(weight, DTensor)
    if not isinstance(weight, Tensor) or not plain or not weight.is_floating_point() or weight.element_size() < 2:
        kind = type(module).__name__ + (f", {type(weight).__name__} of {weight.dtype}" if weight is not None else "")
        raise model_error(
            f"The {part} of the target is quantised ({kind}), and drafters compute with it.",
            "Use a checkpoint that leaves embedding, head and norms as they are (lm_head among what is not converted).",
        )


def _check_shapes(embedding: nn.Module, head: nn.Module | None, tokenizer_length: int) -> None:
    rows, width = _matrix(embedding).shape
    if head is None or getattr(head, "bias", None) is not None or _matrix(head).shape != (rows, width):
        raise model_error(
            f"The language-modelling head of the target is not one matrix of {rows} by {width} like the embedding.",
            "Use a target with a plain linear head.",
        )
    if tokenizer_length > rows:
        raise model_error(
            f"The tokenizer knows {tokenizer_length} tokens, but the model's vocabulary has only {rows} rows.",
            "Use the tokenizer that belongs to the model.",
        )


@torch.inference_mode()
def _run_probe(model: PreTrainedModel, norm: nn.Module) -> _Probe:
    layers = decoder_layers(model)
    rows = model.get_input_embeddings().weight.shape[0]
    token_ids = torch.linspace(0, rows - 1, _PROBE_TOKENS, device=model.device).long()
    seen: dict[str, Tensor] = {}

    def keep_input(_module: nn.Module, arguments: tuple[Tensor, ...], named: dict[str, Any]) -> None:
        seen["first_input"] = arguments[0] if arguments else named["hidden_states"]

    def keep_output(name: str) -> Any:
        def keep(_module: nn.Module, _arguments: Any, output: Tensor | tuple[Tensor, ...]) -> None:
            seen[name] = output[0] if isinstance(output, tuple) else output

        return keep

    with ExitStack() as hooks:
        hooks.callback(layers[0].register_forward_pre_hook(keep_input, with_kwargs=True).remove)
        hooks.callback(layers[-1].register_forward_hook(keep_output("last_output")).remove)
        hooks.callback(norm.register_forward_hook(keep_output("normalised")).remove)
        logits = model(token_ids[None], use_cache=False).logits
    missing = {"first_input", "last_output", "normalised"} - seen.keys()
    if missing:
        raise model_error(
            f"The forward of {type(model).__name__} skips parts that Slipstream reads ({', '.join(sorted(missing))}).",
            "Use a target of the Llama kind (Llama, Qwen, Mistral, Gemma, …).",
        )
    return _Probe(token_ids, logits=logits[0].float(), **{name: row[0].float() for name, row in seen.items()})


def _embedding_scale(model: PreTrainedModel, probe: _Probe, tolerance: float) -> float:
    """The factor between the embedding's rows and what enters the first layer."""
    embedding = model.get_input_embeddings()
    settings = model.config.get_text_config()
    rows = embedding.weight[probe.token_ids].float()
    # Factors are held in the model's dtype, so they are rounded to it (Gemma: 55.4256 becomes 55.5).
    candidates = [1.0, settings.hidden_size**0.5, getattr(settings, "embedding_multiplier", 1.0)]
    factors = [torch.tensor(value, dtype=model.dtype).item() for value in candidates]
    factor = min(factors, key=lambda factor: _distance(rows * factor, probe.first_input))
    if _agree(rows * factor, probe.first_input, tolerance):
        return factor
    raise model_error(
        f"What enters the first layer of {type(model).__name__} is not a multiple of its token embeddings.",
        "Use a target without learned positions, embedding norms or projections.",
    )


def _norm_offset(weight: Tensor, epsilon: float, probe: _Probe, tolerance: float) -> float:
    """0 if the final norm multiplies by its weight, 1 if by one plus its weight."""
    variance = probe.last_output.pow(2).mean(dim=-1, keepdim=True)
    unit = probe.last_output * torch.rsqrt(variance + epsilon)
    # The nearer one, not the first within the tolerance: with large weights the two differ by less than that.
    offset = min((0.0, 1.0), key=lambda offset: _distance(unit * (weight.float() + offset), probe.normalised))
    if _agree(unit * (weight.float() + offset), probe.normalised, tolerance):
        return offset
    raise model_error(
        "The final norm of the target is not an RMS norm with its weight, or one plus its weight.",
        "Use a target of the Llama kind (Llama, Qwen, Mistral, Gemma, …).",
    )


def _check_logits(weight: Tensor, soft_cap: float | None, probe: _Probe, tolerance: float) -> None:
    some = slice(None, None, max(1, len(weight) // _PROBE_ROWS))
    logits = probe.normalised @ weight[some].float().T
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    if not _agree(logits, probe.logits[:, some], tolerance):
        raise model_error(
            "The target changes its logits after the head in a way that Slipstream does not know (a multiplier?).",
            "Use a target whose logits are those of its head, soft-capped or not.",
        )


def _distance(ours: Tensor, theirs: Tensor) -> float:
    return (ours - theirs).abs().mean().item()


def _agree(ours: Tensor, theirs: Tensor, tolerance: float) -> bool:
    largest = theirs.abs().max()
    return bool(largest > 0) and bool((ours - theirs).abs().max() <= tolerance * largest)


def _add_offset(weight: Tensor, offset: float) -> Tensor:
    return weight if offset == 0.0 else (weight.float() + offset).to(weight.dtype)


def _rope(settings: Any) -> dict[str, Any]:
    """Rotary parameters; those of the full-attention layers where layers differ (Gemma 3)."""
    parameters = getattr(settings, "rope_parameters", None) or {}
    if "full_attention" in parameters:
        parameters = parameters["full_attention"]
    if parameters.get("rope_theta") is None:
        raise model_error(
            f"The configuration of the target ({settings.model_type}) names no rope_theta.",
            "Use a target with rotary position embeddings.",
        )
    return dict(parameters)


def _longest_document(settings: Any) -> int:
    rope = _rope(settings)
    if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
        original = rope.get("original_max_position_embeddings")
        return int(original or settings.max_position_embeddings)
    return int(settings.max_position_embeddings)
