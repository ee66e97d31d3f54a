"""What a run minimises, as a recipe writes it: the name of an objective, or a table of names and weights."""

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, PlainSerializer, PositiveFloat

ObjectiveName = Literal["cross_entropy", "kl", "reverse_kl", "js", "tv", "lk_hybrid"]
CROSS_ENTROPY: ObjectiveName = "cross_entropy"
LK_HYBRID: ObjectiveName = "lk_hybrid"


def _read_objective(value: Any) -> Any:
    """A name stands for itself with weight 1."""
    weights = {value: 1.0} if isinstance(value, str) else value
    if not isinstance(weights, dict) or not weights:
        raise ValueError("expected the name of an objective, or a table of names and weights")
    unknown = [name for name in weights if name not in get_args(ObjectiveName)]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is no objective; expected one of {', '.join(get_args(ObjectiveName))}")
    if len(weights) == 1 and 1.0 not in weights.values():
        raise ValueError("a single objective has weight 1; change optimizer.learning_rate instead")
    return weights


def _write_objective(weights: dict[str, float]) -> str | dict[str, float]:
    return next(iter(weights)) if len(weights) == 1 else weights


Objective = Annotated[
    dict[ObjectiveName, PositiveFloat], BeforeValidator(_read_objective), PlainSerializer(_write_objective)
]
