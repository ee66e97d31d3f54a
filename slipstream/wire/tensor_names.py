"""Names of the target's hidden states in a pack's payload: the server writes them, a trainer asks for them."""

LAST_HIDDEN_STATE = "last_hidden_state"
"""Output of the last decoder layer, before the final norm."""


def hidden_state_name(layer_id: int) -> str:
    """Output of decoder layer `layer_id` (zero-based)."""
    return f"hidden_states.{layer_id}"
