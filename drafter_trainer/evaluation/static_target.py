"""The target over a cache of fixed size, for several rows at once, giving the features that a drafter reads.

Shapes: N rows, L new tokens a row, V vocabulary, D hidden size, n features.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch._dynamo.config
from torch import Tensor, nn
from transformers import PreTrainedModel

from drafter_trainer.evaluation.static_attention import (
    ATTENTION_NAME,
    LAYER_ARGUMENT,
    STEP_ARGUMENT,
    CachedStep,
    StaticCache,
)
from slipstream.target_files import model_error
from slipstream.target_loading import decoder_layers

_SHAPES = 64


class StaticTarget:
    """The target with its cache.

    Args:
        model: a causal language model of transformers, in evaluation mode; its attention is exchanged for good.
        layer_ids: zero-based layers whose outputs are the features, ascending; empty for plain decoding.
        max_length: tokens that a row can hold (S).
        compiler: backend of torch.compile for what `forward(compiled=True)` runs; None: nothing is compiled.

    Raises:
        SlipstreamError: MODEL_INVALID, its attention cannot be exchanged.
    """

    def __init__(
        self, model: PreTrainedModel, layer_ids: Sequence[int], max_length: int, compiler: str | None = None
    ) -> None:
        self.model, self.cache = model, StaticCache(max_length)
        self._layers, self._layer_ids = decoder_layers(model), tuple(layer_ids)
        try:
            model.set_attn_implementation(ATTENTION_NAME)
        except (ValueError, KeyError, NotImplementedError) as error:
            raise model_error(
                f"The architecture {type(model).__name__} does not let its attention be exchanged: {error}",
                "Use a target that supports transformers' attention interface.",
            ) from error
        # Layers one by one: all have the same code, so that a few seconds of compiling serve any depth.
        self._compiled = [] if compiler is None else [compiled(layer.forward, compiler) for layer in self._layers]

    def forward(
        self, token_ids: Tensor, positions: Tensor, keep: Tensor | None = None, *, repeated: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Put tokens int [N, L] at their positions int [N, L] → logits [N, L, V], features [N, L, n·D] (or None).

        Args:
            token_ids: those at positions behind a row's end are written too, and hidden from all that stand before.
            positions: per row ascending.
            keep: int [U], the only indices along L that logits are wanted of: [N, U, V].
            repeated: in this shape again and again, behind a forward that was not: compiled, where that was asked for.
        """
        captured: dict[int, Tensor] = {}
        step = CachedStep(self.cache, positions)
        with ExitStack() as hooks:
            if repeated and self._compiled:
                self._use_compiled_layers(step, hooks)
            for layer_id in self._layer_ids:
                hooks.callback(self._layers[layer_id].register_forward_hook(_capture(captured, layer_id)).remove)
            logits = self.model(
                input_ids=token_ids,
                position_ids=positions,
                use_cache=False,
                logits_to_keep=0 if keep is None else keep,
                **{STEP_ARGUMENT: step},
            ).logits
        if len(self.cache.layers) != len(self._layers):
            raise model_error(
                f"{len(self._layers) - len(self.cache.layers)} layers of the target have no keys and values of their "
                "own, so that its cache cannot have a fixed size.",
                "Use a target whose layers all have softmax attention (no state-space or linear attention).",
            )
        features = [captured[layer_id] for layer_id in self._layer_ids]
        return logits, torch.cat(features, dim=-1) if features else None

    def _use_compiled_layers(self, step: CachedStep, hooks: ExitStack) -> None:
        for kind in self.cache.mask_kinds:
            step.causal_mask(*kind)  # here, so that every layer finds it made
        for index, layer in enumerate(self._layers):
            hooks.callback(layer.register_forward_pre_hook(_hand(self.cache.layers[index]), with_kwargs=True).remove)
            layer.forward = self._compiled[index]
            hooks.callback(layer.__dict__.pop, "forward")


def compiled(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """Compile a function for the one shape that it is called in."""
    # One entry a shape and way of decoding, of which a session has more than torch expects by default.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _SHAPES)
    return torch.compile(function, fullgraph=True, dynamic=False, backend=backend)


def _hand(layer: tuple[Tensor, Tensor]) -> Callable[..., tuple[Any, dict[str, Any]]]:
    def hook(_layer: nn.Module, inputs: Any, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return inputs, arguments | {LAYER_ARGUMENT: layer}

    return hook


def _capture(captured: dict[int, Tensor], layer_id: int):  # type: ignore[no-untyped-def]
    def hook(_layer: nn.Module, _inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
        captured[layer_id] = output if isinstance(output, Tensor) else output[0]

    return hook
