"""Which layers of the target a drafter reads: those that the recipe names, or DFlash's spread."""

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import DrafterSpec


def target_layers(drafter: DrafterSpec, num_target_layers: int) -> tuple[int, ...]:
    """Zero-based layers, in the order in which the recipe names them.

    Raises:
        SlipstreamError: TARGET_INCOMPATIBLE, layers that the target does not have.
    """
    num_features = drafter.num_features or drafter.num_layers
    layers = drafter.target_layer_ids or default_target_layer_ids(num_target_layers, num_features)
    if max(layers) >= num_target_layers:
        raise SlipstreamError(
            f"drafter.target_layer_ids names layer {max(layers)}, the target has layers 0 to {num_target_layers - 1}",
            reason=Reason.TARGET_INCOMPATIBLE,
            remedy="Name layers that the target has, or leave target_layer_ids out.",
        )
    return layers


def default_target_layer_ids(num_target_layers: int, num_features: int) -> tuple[int, ...]:
    """Zero-based layers spread as DFlash does (arXiv 2602.06036).

    Raises:
        SlipstreamError: TARGET_INCOMPATIBLE, the target is too shallow for so many different layers.
    """
    if num_features == 1:
        return (num_target_layers // 2,)
    step = (num_target_layers - 4) / (num_features - 1)
    layers = tuple(round(1 + i * step) for i in range(num_features))
    if len(set(layers)) != num_features or min(layers) < 0:
        raise SlipstreamError(
            f"{num_features} different features were asked for, the target has {num_target_layers} layers and the "
            f"default spread needs at least {num_features + 3}",
            reason=Reason.TARGET_INCOMPATIBLE,
            remedy="Lower drafter.num_features or name drafter.target_layer_ids.",
        )
    return layers
