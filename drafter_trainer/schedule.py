"""The learning rate: a pure function of the step, so that a resumed run goes on where it stood."""

import math
from collections.abc import Callable, Mapping

from slipstream.run_spec.spec import OptimizerSpec

_WSD_DECAY_FRACTION = 0.2

_SHAPES: Mapping[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1.0 - progress,
    "wsd": lambda progress: 1.0 - progress,
}
"""Share of the way from the final rate to the full one, by progress through the decay, 0 to 1."""


def learning_rate(spec: OptimizerSpec, step: int, total_steps: int) -> float:
    """Linear warm-up to `learning_rate`, then down to `final_fraction` of it, which is reached at `total_steps`.

    cosine and linear fall from the end of the warm-up on; wsd (warm-up, stable, decay: arXiv 2404.06395) keeps the full
    rate until the last `decay_fraction` of the steps.
    """
    warmup_steps = round(spec.warmup_fraction * total_steps)
    if step < warmup_steps:
        return spec.learning_rate * (step + 1) / warmup_steps
    decay_begins = warmup_steps
    if spec.schedule == "wsd":
        fraction = _WSD_DECAY_FRACTION if spec.decay_fraction is None else spec.decay_fraction
        decay_begins = max(warmup_steps, total_steps - round(fraction * total_steps))
    progress = (step - decay_begins) / max(1, total_steps - decay_begins)
    share = _SHAPES[spec.schedule](min(1.0, max(0.0, progress)))
    return spec.learning_rate * (spec.final_fraction + (1.0 - spec.final_fraction) * share)
