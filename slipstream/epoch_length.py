"""How many packs a recipe's data makes; written by `target-server length`, shown by `slipstream plan`. Torch-free."""

from pydantic import BaseModel, ConfigDict


class EpochLength(BaseModel):
    """Of all epochs of a run together."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    epochs: int
    packs: int
    exact: bool
    """Every document was counted; else it is estimated from some."""
    source: str
    """Where it is from: `counted from …`, `estimated from …`."""
