"""What a server must know of its target to open streams and to answer trainers; whoever has the model says it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import PreTrainedTokenizerFast

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.wire.target_config import TargetConfig


class TargetView(Protocol):
    """Of a TargetModel in this process, or of the one that engines have."""

    @property
    def config(self) -> TargetConfig: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def model_id(self) -> str: ...
    @property
    def revision(self) -> str | None: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device:
        """From which this process writes packs."""

    @property
    def max_document_tokens(self) -> int: ...
    @property
    def computes_any_length(self) -> bool:
        """Whether a part of a pack can be computed, and takes less time than all of it."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast: ...
    def check_layers(self, layer_ids: Sequence[int]) -> None:
        """As TargetModel."""


@dataclass(frozen=True)
class EngineTarget:
    """The target that engine processes have; the tokenizer is this process's own."""

    config: TargetConfig
    fingerprint: str
    model_id: str
    revision: str | None
    dtype: torch.dtype
    max_document_tokens: int
    computes_any_length: bool
    tokenizer: PreTrainedTokenizerFast
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Whatever engines run on, this process copies nothing."""

    @classmethod
    def from_facts(
        cls, facts: Mapping[str, Any], fingerprint: str, tokenizer: PreTrainedTokenizerFast
    ) -> "EngineTarget":
        """`facts`: what an engine says when it is ready."""
        return cls(
            config=TargetConfig.from_json(facts["config"]),
            fingerprint=fingerprint,
            model_id=facts["model_id"],
            revision=facts["revision"],
            dtype=getattr(torch, facts["dtype"]),
            max_document_tokens=facts["max_document_tokens"],
            computes_any_length=facts["computes_any_length"],
            tokenizer=tokenizer,
        )

    def check_layers(self, layer_ids: Sequence[int]) -> None:
        """Raise TARGET_INCOMPATIBLE for a layer that the target does not have."""
        check_layers(layer_ids, self.config.num_layers, self.model_id)


def check_layers(layer_ids: Sequence[int], num_layers: int, model_id: str) -> None:
    """Raise TARGET_INCOMPATIBLE for a layer that the target does not have."""
    unknown = [layer for layer in layer_ids if not 0 <= layer < num_layers]
    if unknown:
        raise SlipstreamError(
            f"Layers {unknown} of {model_id} were asked for; it has layers 0 to {num_layers - 1}.",
            reason=Reason.TARGET_INCOMPATIBLE,
            remedy="Correct drafter.target_layer_ids.",
        )
