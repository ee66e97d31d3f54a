"""④ Packed prefill of the target, with the outputs of chosen decoder layers captured.

One row of T tokens, documents one after another, positions restarting, attention within documents; no padding is
computed, no logits are, and layers after the last one asked for do not run.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.target_files import model_error
from slipstream.target_loading import decoder_layers, decoder_of
from slipstream.wire.tensor_names import LAST_HIDDEN_STATE, hidden_state_name
from target_server.attention import (
    ATTENTION_NAME,
    ONE_PER_DOCUMENT,
    AttentionTraits,
    Kernel,
    PackedDocuments,
    choose_kernel,
    per_document,
    to_device,
)

if TYPE_CHECKING:
    from target_server.compiled_layers import CompiledLayers
    from target_server.forward_graphs import ForwardGraphs

# Mean difference of a layer's output, as a share of its mean magnitude: what many layers of rounding may add up to.
_ROUNDING = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}


class WrongResultError(RuntimeError):
    """Compiled code does not compute what the model does."""


class _AllCaptured(Exception):  # noqa: N818 - not an error: the regular end of a forward
    """Leaves the decoder once every layer asked for has run."""


class PackedForward:
    """Runs a loaded model over packs. One thread at a time: the thread that owns the model."""

    def __init__(self, model: PreTrainedModel, *, backend: str | None = None) -> None:
        """Switch `model` to packed attention, try it on a few tokens, and choose the attention kernel.

        Args:
            model: frozen.
            backend: of torch.compile; None: layers run as they are. Compiled packs are named by `prepare`.

        Raises:
            SlipstreamError: MODEL_INVALID, when a layer mixes tokens by anything but attention over documents.
        """
        self._decoder = decoder_of(model)
        self._layers = decoder_layers(model)
        self._backend = backend
        self._compiled: dict[int, CompiledLayers] = {}
        """By rows of a pack, warmed up."""
        self._graphs: dict[int, ForwardGraphs] = {}
        """By rows of a pack, where the host is slower than the device."""
        self._device = model.get_input_embeddings().weight.device
        _use_packed_attention(model)
        self._kernel: Kernel = per_document
        self._traits = self._observe()
        self._kernel, self.attention = choose_kernel(list(self._traits.values()), self._device, model.dtype)

    @property
    def num_layers(self) -> int:
        """Decoder layers of the target."""
        return len(self._layers)

    @property
    def is_compiled(self) -> bool:
        """Whether layers are compiled, each for packs of a fixed number of tokens."""
        return self._backend is not None

    def is_prepared(self, rows: int) -> bool:
        """Whether packs of `rows` tokens can be captured: where nothing is compiled, all can."""
        return self._backend is None or rows in self._compiled

    def prepare(self, rows: int) -> int:
        """Compile all layers for packs of `rows` tokens and compare them with the layers as they are; returns graphs.

        Idempotent. Nothing is to be done, and 0 is returned, where nothing is compiled.

        Raises:
            RuntimeError: torch cannot compile a layer, or it computes something else (WrongResultError).
        """
        if self._backend is None or rows in self._compiled:
            return 0
        # Here, because it loads the compiler, for which a server without one would wait two seconds.
        from slipstream.compiled_code import compiled_graphs
        from target_server.compiled_layers import CompiledLayers

        before = compiled_graphs()
        compiled = CompiledLayers(list(self._layers), self._traits, self._backend)
        lengths = (rows - rows // 2, rows // 2 - 1) if rows > 3 else (rows,)
        tokens = (np.arange(rows) * 7919 % self._decoder.get_input_embeddings().num_embeddings).astype(np.int32)
        # All layers run; that many outputs of a large target would not fit.
        compared = (0, self.num_layers // 2, self.num_layers - 1)
        expected = self._run(tokens[: sum(lengths)], lengths, compared)
        for frozen in (False, True):
            with compiled.in_place(frozen=frozen):
                outputs = self._run(tokens, lengths, compared)
                launch_bound = self._is_launch_bound(tokens, lengths)
        for layer in compared:
            _check_equal(layer, outputs[layer][: sum(lengths)], expected[layer])
        self._compiled[rows] = compiled
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # a trainer may share the card, and nothing after this needs as much
        if launch_bound:
            from target_server.forward_graphs import ForwardGraphs

            self._graphs[rows] = ForwardGraphs(rows, self._device, self._kernel, self._run_documents)
        return compiled_graphs() - before

    def is_recorded(self, rows: int) -> bool:
        """Whether packs of `rows` tokens are launched as CUDA graphs."""
        return rows in self._graphs

    def stop_compiling(self) -> None:
        """From now on layers run as they are."""
        self._backend = None
        self._compiled.clear()
        self._graphs.clear()

    def capture(
        self,
        token_ids: npt.NDArray[np.int32],
        document_lengths: Sequence[int],
        layer_ids: Sequence[int],
        last_hidden_state: bool,
    ) -> dict[str, Tensor]:
        """Outputs `[T, D]` of the layers, in the model's dtype, on its device; zeros after the last document.

        On a GPU they may still be being computed. A full pack's tensors are the layers' own outputs, not copies; read
        them, do not write into them.

        Args:
            token_ids: `[T]`; what follows the last document is ignored.
            document_lengths: tokens of each document, in order; their sum is at most T.
            layer_ids: zero-based layers, each gives `hidden_states.{l}`.
            last_hidden_state: also give the output of the last layer before the final norm.

        Raises:
            SlipstreamError: PACK_OUTSIDE_BUCKETS, T was not prepared and layers are compiled.
        """
        rows, used = len(token_ids), sum(document_lengths)
        assert used <= rows, f"documents of {used} tokens in a pack of {rows}"
        wanted = tuple(dict.fromkeys(layer_ids) | ({self.num_layers - 1: None} if last_hidden_state else {}))
        if self._backend is None:
            outputs = self._run(token_ids[:used], document_lengths, wanted)
        else:
            outputs = self._run_compiled(token_ids, document_lengths, wanted)
        padded = {layer: _pad(output, used, rows) for layer, output in outputs.items()}
        captured = {hidden_state_name(layer): padded[layer] for layer in layer_ids}
        return captured | ({LAST_HIDDEN_STATE: padded[self.num_layers - 1]} if last_hidden_state else {})

    def _run_compiled(
        self, token_ids: npt.NDArray[np.int32], document_lengths: Sequence[int], layer_ids: Sequence[int]
    ) -> dict[int, Tensor]:
        """As `_run`, of the whole pack: compiled code knows one length only."""
        rows, used = len(token_ids), sum(document_lengths)
        if rows not in self._compiled:
            raise SlipstreamError(
                f"The target was compiled for packs of {sorted(self._compiled)} tokens, and this one has {rows}.",
                reason=Reason.PACK_OUTSIDE_BUCKETS,
                remedy="Report this: each length is to be prepared before its first pack.",
            )
        tokens = np.zeros_like(token_ids)
        tokens[:used] = token_ids[:used]
        with self._compiled[rows].in_place(frozen=True), torch.no_grad():
            recorded = self._graphs.get(rows)
            outputs = recorded.run(*_rows_of(tokens, document_lengths), layer_ids) if recorded is not None else None
            return self._run(tokens, document_lengths, layer_ids) if outputs is None else outputs

    def _run(
        self, token_ids: npt.NDArray[np.int32], document_lengths: Sequence[int], layer_ids: Sequence[int]
    ) -> dict[int, Tensor]:
        """Outputs `[T, D]` by layer. What follows the last document is computed as one more, all at position 0."""
        tokens, positions, lengths = _rows_of(token_ids, document_lengths)
        documents = PackedDocuments(lengths, self._device, self._kernel)
        on_device = to_device(tokens, self._device), to_device(positions, self._device)
        return self._run_documents(documents, *on_device, layer_ids)

    def _run_documents(
        self, documents: PackedDocuments, tokens: Tensor, positions: Tensor, layer_ids: Sequence[int]
    ) -> dict[int, Tensor]:
        assert layer_ids and min(layer_ids) >= 0 and max(layer_ids) < self.num_layers, f"no such layers: {layer_ids}"
        outputs: dict[int, Tensor] = {}
        last = max(layer_ids)
        # Compiled code is kept away from inference tensors, which torch.compile only half knows.
        without_gradients = torch.inference_mode() if self._backend is None else torch.no_grad()
        with without_gradients, documents.in_use(), ExitStack() as hooks:
            for layer_id in sorted(layer_ids):
                hook = _capturing_hook(outputs, layer_id, leave=layer_id == last)
                hooks.callback(self._layers[layer_id].register_forward_hook(hook).remove)
            try:
                self._decoder(input_ids=tokens[None], position_ids=positions[None], use_cache=False)
            except _AllCaptured:
                return outputs
        raise AssertionError(f"the decoder ended without running layer {last}")

    def _is_launch_bound(self, tokens: npt.NDArray[np.int32], lengths: Sequence[int]) -> bool:
        """Whether a GPU waits for the host in a compiled forward."""
        if self._device.type != "cuda" or self.attention.startswith(ONE_PER_DOCUMENT):
            return False
        from target_server.forward_graphs import LAUNCH_BOUND

        torch.cuda.synchronize(self._device)
        began = time.perf_counter()
        self._run(tokens, lengths, (self.num_layers - 1,))
        launched = time.perf_counter() - began
        torch.cuda.synchronize(self._device)
        return launched > LAUNCH_BOUND * (time.perf_counter() - began)

    def _observe(self) -> dict[int, AttentionTraits]:
        """Run a few tokens through all layers and see what they ask of attention, by the attention module's id."""
        documents = PackedDocuments((2, 1), self._device, self._kernel)
        tokens, positions = (torch.tensor(row, device=self._device) for row in ([0, 0, 0], [0, 1, 0]))
        self._run_documents(documents, tokens, positions, (self.num_layers - 1,))
        for index, layer in enumerate(self._layers):
            if not any(id(module) in documents.traits for module in layer.modules()):
                raise model_error(
                    f"Layer {index} ({type(layer).__name__}) of the target does not use transformers' attention "
                    "interface, so its documents cannot be kept apart in a pack.",
                    "Use a target whose layers all have softmax attention (no state-space or linear attention).",
                )
        return documents.traits


def _use_packed_attention(model: PreTrainedModel) -> None:
    try:
        model.set_attn_implementation(ATTENTION_NAME)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise model_error(
            f"The architecture {type(model).__name__} does not let its attention be exchanged: {error}",
            "Use a target that supports transformers' attention interface.",
        ) from error


def _capturing_hook(outputs: dict[int, Tensor], layer_id: int, leave: bool) -> Any:
    def keep(_layer: nn.Module, _arguments: Any, output: Tensor | tuple[Tensor, ...]) -> None:
        row = output[0] if isinstance(output, tuple) else output
        outputs[layer_id] = row[0]
        if leave:
            raise _AllCaptured

    return keep


def _rows_of(
    token_ids: npt.NDArray[np.int32], document_lengths: Sequence[int]
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Token ids and positions `[T]`, int64, and lengths that fill the row."""
    rest = len(token_ids) - sum(document_lengths)
    positions = [np.arange(length, dtype=np.int64) for length in document_lengths]
    positions.append(np.zeros(rest, dtype=np.int64))
    lengths = (*document_lengths, rest) if rest else tuple(document_lengths)
    return torch.from_numpy(token_ids.astype(np.int64)), torch.from_numpy(np.concatenate(positions)), lengths


def _pad(output: Tensor, used: int, rows: int) -> Tensor:
    """`[rows, D]` with zeros from `used` on. The output of a whole pack is zeroed in place: no layer reads it now."""
    with torch.inference_mode(output.is_inference()):
        if output.shape[0] == rows:
            output[used:] = 0
            return output
        padded = output.new_empty(rows, output.shape[1])
        padded[:used] = output
        padded[used:] = 0
    return padded


def _check_equal(layer: int, ours: Tensor, theirs: Tensor) -> None:
    """Raises WrongResultError unless they are equal but for rounding."""
    difference = (ours.float() - theirs.float()).abs().mean() / theirs.float().abs().mean()
    if not difference <= _ROUNDING[ours.dtype]:
        raise WrongResultError(
            f"compiled, layer {layer} of the target computes something else: {difference:.2g} of its mean value away"
        )
