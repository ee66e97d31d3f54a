"""The target over a cache of fixed size, for several rows at once, giving the features that a drafter reads.

Shapes: N rows, L new tokens a row, V vocabulary, D hidden size, n features.
"""

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from drafter_trainer.evaluation.static_attention import ATTENTION_NAME, STEP_ARGUMENT, CachedStep, StaticCache
from slipstream.target_files import model_error
from slipstream.target_loading import decoder_layers


class StaticTarget:
    """The target with its cache.

    Args:
        model: a causal language model of transformers, in evaluation mode; its attention is exchanged for good.
        layer_ids: zero-based layers whose outputs are the features, ascending; empty for plain decoding.
        max_length: tokens that a row can hold (S).

    Raises:
        SlipstreamError: MODEL_INVALID, its attention cannot be exchanged.
    """

    def __init__(self, model: PreTrainedModel, layer_ids: Sequence[int], max_length: int) -> None:
        self.model, self.cache = model, StaticCache(max_length)
        self._layers, self._layer_ids = decoder_layers(model), tuple(layer_ids)
        try:
            model.set_attn_implementation(ATTENTION_NAME)
        except (ValueError, KeyError, NotImplementedError) as error:
            raise model_error(
                f"The architecture {type(model).__name__} does not let its attention be exchanged: {error}",
                "Use a target that supports transformers' attention interface.",
            ) from error

    def forward(self, token_ids: Tensor, positions: Tensor, keep: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Put tokens int [N, L] at their positions int [N, L] → logits [N, L, V], features [N, L, n·D] (or None).

        Args:
            token_ids: those at positions behind a row's end are written too, and hidden from all that stand before.
            positions: per row ascending.
            keep: int [U], the only indices along L that logits are wanted of: [N, U, V].
        """
        captured: dict[int, Tensor] = {}
        with ExitStack() as hooks:
            for layer_id in self._layer_ids:
                hooks.callback(self._layers[layer_id].register_forward_hook(_capture(captured, layer_id)).remove)
            logits = self.model(
                input_ids=token_ids,
                position_ids=positions,
                use_cache=False,
                logits_to_keep=0 if keep is None else keep,
                **{STEP_ARGUMENT: CachedStep(self.cache, positions)},
            ).logits
        if len(self.cache.layers) != len(self._layers):
            raise model_error(
                f"{len(self._layers) - len(self.cache.layers)} layers of the target have no keys and values of their "
                "own, so that its cache cannot have a fixed size.",
                "Use a target whose layers all have softmax attention (no state-space or linear attention).",
            )
        features = [captured[layer_id] for layer_id in self._layer_ids]
        return logits, torch.cat(features, dim=-1) if features else None


def _capture(captured: dict[int, Tensor], layer_id: int):  # type: ignore[no-untyped-def]
    def hook(_layer: nn.Module, _inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
        captured[layer_id] = output if isinstance(output, Tensor) else output[0]

    return hook
