"""Is the target that decodes the one that the drafter was trained for? Sizes alone would not tell two models apart."""

from collections.abc import Sequence

from drafter_trainer.drafter_config import DrafterConfig
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import TargetSpec
from slipstream.target_files import locate_target
from slipstream.target_fingerprint import fingerprint_target
from slipstream.wire.target_config import TargetConfig


def is_training_target(
    used: TargetSpec, trained: TargetSpec, fingerprint: str | None, *, allow_other: bool | None
) -> bool | None:
    """Compare the files of the target with the fingerprint in the checkpoint.

    Args:
        used: the target that decodes. Its dtype does not matter here: a target may be measured in another precision.
        trained: the run's; the fingerprint was taken in its dtype.
        fingerprint: from the checkpoint; None: a published drafter that names none.
        allow_other: a difference is meant; None: it cannot be, the command has no such flag.

    Returns:
        False only where another target was allowed; None where nothing says which one it was.

    Raises:
        SlipstreamError: TARGET_INCOMPATIBLE, it is another one and that is not allowed; MODEL_INVALID, there is none.
    """
    if fingerprint is None:
        return None
    found = fingerprint_target(locate_target(used), trained.dtype)
    if found == fingerprint:
        return True
    if allow_other:
        return False
    raise SlipstreamError(
        f"target {used.model} is not the one that the drafter was trained for: its weights, tokenizer, configuration "
        f"or revision differ (fingerprint {found[:16]}, expected {fingerprint[:16]})",
        reason=Reason.TARGET_INCOMPATIBLE,
        remedy="Give that target with --target-model"
        + (".", ", or add --allow-other-target to measure the drafter on this one.")[allow_other is not None],
    )


def outside_of_target(layer_ids: Sequence[int], mask_token_id: int, target: TargetConfig) -> list[str]:
    """In words, what a drafter names that the target does not have."""
    layers = [layer for layer in layer_ids if layer >= target.num_layers]
    wrong = [f"target layer {max(layers)} (expected 0 to {target.num_layers - 1})"] if layers else []
    if mask_token_id >= target.vocab_size:
        wrong.append(f"mask token {mask_token_id} (expected 0 to {target.vocab_size - 1})")
    return wrong


def check_fits(config: DrafterConfig, target: TargetConfig) -> None:
    """Compare the sizes of drafter and target.

    Raises:
        SlipstreamError: TARGET_INCOMPATIBLE, with what was found and expected.
    """
    pairs = {
        "vocabulary rows": (target.vocab_size, config.vocab_size),
        "hidden size": (target.hidden_size, config.hidden_size),
        "layers": (target.num_layers, config.num_target_layers),
        "model type": (target.model_type, config.target_model_type),
    }
    wrong = [f"{name} {found} (expected {expected})" for name, (found, expected) in pairs.items() if found != expected]
    if not wrong:
        wrong = outside_of_target(config.target_layer_ids, config.mask_token_id, target)
    if wrong:
        raise SlipstreamError(
            f"the target does not fit the drafter: {', '.join(wrong)}",
            reason=Reason.TARGET_INCOMPATIBLE,
            remedy="Give the target that the drafter was trained for with --target-model.",
        )
