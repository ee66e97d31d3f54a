"""The frozen target of a server: loaded once, identified by its fingerprint, run over packs."""

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from slipstream.compile_guards import disabling_variables
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import TargetSpec
from slipstream.target_facts import read_frozen_weights, read_target_facts
from slipstream.target_fingerprint import fingerprint_target
from slipstream.target_loading import LoadedTarget, load_causal_lm
from slipstream.telemetry.logs import log_event
from slipstream.tensor_parallel import Rank
from slipstream.wire.target_config import TargetConfig
from target_server.forward import PackedForward
from target_server.target_view import check_layers

_logger = logging.getLogger(__name__)
# Of torch, its backends, and kernels of quantised layers that run for the first time; SlipstreamError: a second
# forward would have compiled again.
_COMPILING_FAILED = (
    RuntimeError, SlipstreamError, ImportError, OSError, TypeError, ValueError, AttributeError, LookupError,
    AssertionError,
)  # fmt: skip


class TargetModel:
    """A causal language model that gives hidden states of packs. `capture` belongs to one thread."""

    def __init__(self, loaded: LoadedTarget, spec: TargetSpec, fingerprint: str) -> None:
        """Use `TargetModel.load`. The loaded model's attention is exchanged: it serves packs only from here on."""
        facts = read_target_facts(loaded.model, loaded.tokenizer)
        self.config: TargetConfig = facts.config
        self.fingerprint = fingerprint
        self.tokenizer: PreTrainedTokenizerFast = loaded.tokenizer
        self.model_id = Path(spec.model).name if Path(spec.model).expanduser().exists() else spec.model
        self.revision: str | None = loaded.files.revision
        self.dtype: torch.dtype = loaded.model.dtype
        self.device: torch.device = loaded.model.device
        self.max_document_tokens = facts.max_document_tokens
        self._model = loaded.model
        self._must_compile = spec.compile is True
        if loaded.ranks > 1:
            backend, self.compilation = None, f"no: its layers are spread over {loaded.ranks} devices"
        else:
            backend, self.compilation = choose_backend(spec, self.device, os.environ)
        self._forward = PackedForward(loaded.model, backend=backend)
        self.attention = self._forward.attention

    @classmethod
    def load(
        cls, spec: TargetSpec, *, device: str, fingerprint: str | None = None, rank: Rank | None = None
    ) -> "TargetModel":
        """Load, fingerprint and check the target on `device` (`cpu`, `cuda` or `cuda:N`).

        Args:
            spec: which target.
            device: where to.
            fingerprint: the target's, where somebody else has read the files for it.
            rank: of several processes that load one model together.

        Raises:
            SlipstreamError: MODEL_INVALID, ENVIRONMENT_UNSUPPORTED or OUT_OF_MEMORY, with what to do about it.
        """
        start = time.monotonic()
        loaded = load_causal_lm(spec, device, rank)
        if fingerprint is None:
            # The files were just read, so hashing them costs no disk.
            fingerprint = fingerprint_target(loaded.files, spec.dtype)
        target = cls(loaded, spec, fingerprint)
        log_event(
            _logger,
            "info",
            "target_loaded",
            model=target.model_id,
            architecture=target.config.model_type,
            dtype=spec.dtype,
            quantised="no" if loaded.quantised is None else str(loaded.quantised),
            device=str(target.device),
            attention=target.attention,
            compiled=target.compilation,
            fingerprint=fingerprint[:16],
            seconds=time.monotonic() - start,
        )
        return target

    @property
    def computes_any_length(self) -> bool:
        """Whether a part of a pack can be computed, and takes less time than all of it."""
        return not self._forward.is_compiled

    def is_prepared(self, pack_tokens: int) -> bool:
        """Whether `prepare` has nothing to do for packs of this length."""
        return self._forward.is_prepared(pack_tokens)

    def prepare(self, pack_tokens: int) -> None:
        """Get ready for packs of one length: compile the layers for it, where they are compiled. Idempotent.

        Raises:
            SlipstreamError: ENVIRONMENT_UNSUPPORTED when `target.compile` is true and torch cannot, or what it makes
                computes something else; with auto, the layers run as they are from then on, and the log says so.
        """
        start = time.monotonic()
        try:
            graphs = self._forward.prepare(pack_tokens)
        except _COMPILING_FAILED as error:  # running out of memory is one
            self._stop_compiling(error)
            return
        if graphs:
            log_event(
                _logger, "info", "target_compiled", pack_tokens=pack_tokens, graphs=graphs,
                recorded=self._forward.is_recorded(pack_tokens),
                seconds=round(time.monotonic() - start, 1),
            )  # fmt: skip

    def _stop_compiling(self, error: Exception) -> None:
        """Layers run as they are from now on, and the log says so.

        Raises:
            SlipstreamError: ENVIRONMENT_UNSUPPORTED, `target.compile` is true.
        """
        first_line = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        if self._must_compile:
            raise SlipstreamError(
                f"The layers of {self.model_id} cannot be compiled: {first_line}",
                reason=Reason.ENVIRONMENT_UNSUPPORTED,
                remedy="Set target.compile = false: the target is slower then.",
            ) from error
        self._forward.stop_compiling()
        log_event(
            _logger, "warning", "target_not_compiled", error=first_line, effect="the target is slower",
            remedy="target.compile = false for silence",
        )  # fmt: skip

    def frozen_weights(self) -> dict[str, Tensor]:
        """What drafters keep of the target, in host memory, in its dtype.

        `embed_tokens.weight` `[V, D]`, `lm_head.weight` `[V, D]` (absent when tied), `norm.weight` `[D]`.
        """
        return read_frozen_weights(self._model, self.config)

    def capture(
        self,
        token_ids: npt.NDArray[np.int32],
        document_lengths: Sequence[int],
        layer_ids: Sequence[int],
        last_hidden_state: bool,
    ) -> dict[str, Tensor]:
        """Hidden states of a pack: `hidden_states.{l}` for each layer, and `last_hidden_state` when asked.

        Each is `[T, D]` in the target's dtype on its device, where it may still be being computed; rows after the last
        document are zero. The last hidden state is the output of the last decoder layer, before the final norm.

        Args:
            token_ids: `[T]`; what follows the last document is ignored.
            document_lengths: tokens of each document, in order; their sum is at most T.
            layer_ids: zero-based decoder layers.
            last_hidden_state: whether the trainer wants the last hidden state too.

        Raises:
            SlipstreamError: TARGET_INCOMPATIBLE (a layer that the target does not have), DATA_INVALID (a document
                longer than the target's positions), OUT_OF_MEMORY, ENVIRONMENT_UNSUPPORTED (`target.compile` is true,
                and a layer would be compiled again).
        """
        self.check_layers(layer_ids)
        longest = max(document_lengths)
        if longest > self.max_document_tokens:
            raise SlipstreamError(
                f"A document has {longest} tokens, but the target is only right up to {self.max_document_tokens}.",
                reason=Reason.DATA_INVALID,
                remedy=f"Set data.max_document_tokens to at most {self.max_document_tokens}.",
            )
        with self._memory_explained(len(token_ids)):
            try:
                return self._forward.capture(token_ids, document_lengths, layer_ids, last_hidden_state)
            except SlipstreamError as error:
                if error.reason is not Reason.PACK_OUTSIDE_BUCKETS or not self.is_prepared(len(token_ids)):
                    raise
                # A layer that changes while it runs, which the warm-up did not show.
                self._stop_compiling(error)
            return self._forward.capture(token_ids, document_lengths, layer_ids, last_hidden_state)

    @contextmanager
    def _memory_explained(self, pack_tokens: int) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise SlipstreamError(
                f"The target ran out of memory on {self.device} in a pack of {pack_tokens} tokens.",
                reason=Reason.OUT_OF_MEMORY,
                remedy="Lower data.pack_tokens, or use a device with more memory.",
            ) from error

    def check_layers(self, layer_ids: Sequence[int]) -> None:
        """Raise TARGET_INCOMPATIBLE for a layer that the target does not have."""
        check_layers(layer_ids, self.config.num_layers, self.model_id)


def choose_backend(spec: TargetSpec, device: torch.device, environment: Mapping[str, str]) -> tuple[str | None, str]:
    """The backend of torch.compile, or None to leave layers as they are; and one line that says which and why.

    Raises:
        SlipstreamError: ENVIRONMENT_UNSUPPORTED, `target.compile` is true and the environment forbids it.
    """
    disabling = ", ".join(disabling_variables(environment))
    if spec.compile is True:
        if disabling:
            raise SlipstreamError(
                f"target.compile is true, but {disabling} is set, with which nothing is compiled.",
                reason=Reason.ENVIRONMENT_UNSUPPORTED,
                remedy="Unset it in the environment of the target server, or set target.compile = false.",
            )
        return "inductor", "yes: target.compile is true"
    if spec.compile is False:
        return None, "no: target.compile is false"
    if device.type != "cuda":
        return None, f"no: target.compile is auto, and on {device.type} compiling takes longer than it saves"
    if disabling:
        return None, f"no: target.compile is auto, and {disabling} is set"
    return "inductor", "yes: target.compile is auto, and the device is a GPU"
