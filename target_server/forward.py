"""④ Packed prefill of the target, with the outputs of chosen decoder layers captured.

One row of T tokens, documents one after another, positions restarting, attention within documents; no padding is
computed, no logits are, and layers after the last one asked for do not run.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slipstream.errors import SlipstreamError
from slipstream.target_files import model_error
from slipstream.target_loading import decoder_layers, decoder_of
from target_server.attention import (
    ATTENTION_NAME,
    AttentionTraits,
    Kernel,
    PackedDocuments,
    choose_kernel,
    per_document,
)

LAST_HIDDEN_STATE = "last_hidden_state"


def hidden_state_name(layer_id: int) -> str:
    """Name in a payload of the output of decoder layer `layer_id` (zero-based)."""
    return f"hidden_states.{layer_id}"


class _AllCaptured(Exception):  # noqa: N818 - not an error: the regular end of a forward
    """Leaves the decoder once every layer asked for has run."""


class PackedForward:
    """Runs a loaded model over packs. One thread at a time: the thread that owns the model."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Switch `model` to packed attention, try it on a few tokens, and choose the attention kernel.

        Raises:
            SlipstreamError: MODEL_INVALID, when a layer mixes tokens by anything but attention over documents.
        """
        self._decoder = decoder_of(model)
        self._layers = decoder_layers(model)
        self._device = model.get_input_embeddings().weight.device
        _use_packed_attention(model)
        self._kernel: Kernel = per_document
        traits = self._observe()
        self._kernel, self.attention = choose_kernel(traits, self._device, model.dtype)

    @property
    def num_layers(self) -> int:
        """Decoder layers of the target."""
        return len(self._layers)

    def capture(
        self,
        token_ids: npt.NDArray[np.int32],
        document_lengths: Sequence[int],
        layer_ids: Sequence[int],
        last_hidden_state: bool,
    ) -> dict[str, Tensor]:
        """Outputs `[T, D]` of the layers, in the model's dtype, on its device; zeros after the last document.

        A full pack's tensors are the layers' own outputs, not copies; read them, do not write into them.

        Args:
            token_ids: `[T]`; what follows the last document is ignored.
            document_lengths: tokens of each document, in order; their sum is at most T.
            layer_ids: zero-based layers, each gives `hidden_states.{l}`.
            last_hidden_state: also give the output of the last layer before the final norm.
        """
        used = sum(document_lengths)
        assert used <= len(token_ids), f"documents of {used} tokens in a pack of {len(token_ids)}"
        wanted = dict.fromkeys(layer_ids) | ({self.num_layers - 1: None} if last_hidden_state else {})
        outputs, _ = self._run(token_ids[:used], document_lengths, tuple(wanted))
        padded = {layer: _pad(output, len(token_ids)) for layer, output in outputs.items()}
        captured = {hidden_state_name(layer): padded[layer] for layer in layer_ids}
        return captured | ({LAST_HIDDEN_STATE: padded[self.num_layers - 1]} if last_hidden_state else {})

    def _run(
        self, token_ids: npt.NDArray[np.int32], document_lengths: Sequence[int], layer_ids: Sequence[int]
    ) -> tuple[dict[int, Tensor], PackedDocuments]:
        """Outputs `[used, D]` by layer, and the documents as the attention saw them."""
        assert layer_ids and min(layer_ids) >= 0 and max(layer_ids) < self.num_layers, f"no such layers: {layer_ids}"
        positions = np.concatenate([np.arange(length, dtype=np.int64) for length in document_lengths])
        outputs: dict[int, Tensor] = {}
        last = max(layer_ids)
        with torch.inference_mode(), ExitStack() as hooks:
            documents = PackedDocuments(document_lengths, self._device, self._kernel)
            for layer_id in sorted(layer_ids):
                hook = _capturing_hook(outputs, layer_id, leave=layer_id == last)
                hooks.callback(self._layers[layer_id].register_forward_hook(hook).remove)
            try:
                self._decoder(
                    input_ids=self._on_device(token_ids.astype(np.int64)),
                    position_ids=self._on_device(positions),
                    use_cache=False,
                    packed_documents=documents,
                )
            except _AllCaptured:
                return outputs, documents
        raise AssertionError(f"the decoder ended without running layer {last}")

    def _on_device(self, row: npt.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(row).to(self._device, non_blocking=True)[None]

    def _observe(self) -> tuple[AttentionTraits, ...]:
        """Run a few tokens through all layers and see what they ask of attention."""
        try:
            _, documents = self._run(np.zeros(3, dtype=np.int32), (2, 1), (self.num_layers - 1,))
        except TypeError as error:  # an older kind of modelling code, with a fixed list of arguments
            raise _attention_fixed(type(self._decoder), error) from error
        for index, layer in enumerate(self._layers):
            if not any(id(module) in documents.traits for module in layer.modules()):
                raise model_error(
                    f"Layer {index} ({type(layer).__name__}) of the target does not use transformers' attention "
                    "interface, so its documents cannot be kept apart in a pack.",
                    "Use a target whose layers all have softmax attention (no state-space or linear attention).",
                )
        return tuple(documents.traits.values())


def _use_packed_attention(model: PreTrainedModel) -> None:
    try:
        model.set_attn_implementation(ATTENTION_NAME)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise _attention_fixed(type(model), error) from error


def _attention_fixed(architecture: type, error: Exception) -> SlipstreamError:
    return model_error(
        f"The architecture {architecture.__name__} does not let its attention be exchanged: {error}",
        "Use a target that supports transformers' attention interface.",
    )


def _capturing_hook(outputs: dict[int, Tensor], layer_id: int, leave: bool) -> Any:
    def keep(_layer: nn.Module, _arguments: Any, output: Tensor | tuple[Tensor, ...]) -> None:
        row = output[0] if isinstance(output, tuple) else output
        outputs[layer_id] = row[0]
        if leave:
            raise _AllCaptured

    return keep


def _pad(output: Tensor, rows: int) -> Tensor:
    if output.shape[0] == rows:
        return output
    with torch.inference_mode():
        padded = output.new_empty(rows, output.shape[1])
        padded[: output.shape[0]] = output
        padded[output.shape[0] :] = 0
    return padded
