"""Which heads a drafter's block attention can have: a plan refuses others as the trainer does. Torch-free."""

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason


def require_heads(num_attention_heads: int, num_key_value_heads: int, head_dim: int) -> None:
    """Refuse heads that do not divide, or that cannot be rotated.

    Raises:
        SlipstreamError: SPEC_INVALID.
    """
    if num_attention_heads % num_key_value_heads:
        raise SlipstreamError(
            f"{num_attention_heads} attention heads are no multiple of {num_key_value_heads} key/value heads",
            reason=Reason.SPEC_INVALID,
            remedy="Set drafter.num_attention_heads and drafter.num_key_value_heads so that they divide.",
        )
    if head_dim % 2:
        raise SlipstreamError(
            f"head_dim is {head_dim}, rotary positions need an even one",
            reason=Reason.SPEC_INVALID,
            remedy="Set drafter.head_dim to an even number.",
        )
