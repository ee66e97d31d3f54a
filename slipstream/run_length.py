"""How many steps a run has: the plan says so before it starts, the trainer counts by the same rule. No torch here."""

from slipstream.counted import counted
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import RunSpec


def total_steps(spec: RunSpec, packs: int | None) -> int | None:
    """Whole steps: max_steps, max_tokens (never more tokens than that) or all packs, whichever comes first.

    Args:
        spec: of the run.
        packs: of its data, all epochs together; None: they are not known, or go on for ever.

    Returns:
        None where only the data decides, and its packs are not known.

    Raises:
        SlipstreamError: DATA_INVALID, the data does not fill one step.
    """
    train = spec.train
    if packs is not None and packs < train.packs_per_step:
        raise SlipstreamError(
            f"The data does not fill one step: {counted(packs, 'pack')}, a step takes {train.packs_per_step}.",
            reason=Reason.DATA_INVALID,
            remedy="Lower train.packs_per_step or data.pack_tokens, raise train.epochs, or add conversations.",
        )
    limits = (
        train.max_steps,
        None if train.max_tokens is None else train.max_tokens // (train.packs_per_step * spec.data.pack_tokens),
        None if packs is None else packs // train.packs_per_step,
    )
    return min((limit for limit in limits if limit is not None), default=None)
