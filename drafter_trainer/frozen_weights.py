"""The target's embedding, head and final norm: served by the target, kept once, never trained."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.errors import SlipstreamError
from slipstream.hidden_states.v1 import hidden_state_service_pb2 as pb
from slipstream.run_spec.reasons import Reason
from slipstream.wire.target_config import TargetConfig, frozen_weight_names
from slipstream.wire.transports import PayloadReader, PayloadRef


@dataclass(frozen=True)
class FrozenWeights:
    """On the trainer's device, in its compute dtype."""

    embedding: Tensor
    """[V, D]"""
    head: Tensor
    """[V, D]; the embedding itself where the target ties them."""
    final_norm: Tensor
    """[D], float32; an offset the target's norm adds is included."""
    embedding_scale: float

    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 [...] → [..., D], as the target embeds tokens."""
        rows = functional.embedding(token_ids, self.embedding)
        return rows if self.embedding_scale == 1.0 else rows * self.embedding_scale


def read_frozen_weights(
    reader: PayloadReader,
    target: pb.GetTargetResponse,
    config: TargetConfig,
    *,
    device: torch.device,
    compute_dtype: torch.dtype,
) -> FrozenWeights:
    """Read the payload that GetTarget names.

    Raises:
        SlipstreamError: TARGET_INCOMPATIBLE when a tensor has another shape than the target's description says;
            what reading a payload raises.
    """
    names = frozen_weight_names(config.tie_word_embeddings)
    tensors = reader.read(PayloadRef.of_fixed(target.frozen_weights), names)
    table = (config.vocab_size, config.hidden_size)
    for name, tensor in tensors.items():
        expected = (config.hidden_size,) if name == "norm.weight" else table
        if tuple(tensor.shape) != expected:
            raise SlipstreamError(
                f"The target serves {name} as {list(tensor.shape)}, its description says {list(expected)}.",
                reason=Reason.TARGET_INCOMPATIBLE,
                remedy="Target server and trainer must be of the same version.",
            )
    embedding = tensors["embed_tokens.weight"].to(device, compute_dtype)
    head = embedding if config.tie_word_embeddings else tensors["lm_head.weight"].to(device, compute_dtype)
    return FrozenWeights(embedding, head, tensors["norm.weight"].to(device, torch.float32), config.embedding_scale)
