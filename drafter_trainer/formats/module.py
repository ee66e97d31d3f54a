"""A published drafter as the module that trains and decodes."""

import torch
from torch import Tensor

from drafter_trainer.drafter import DFlashDrafter
from drafter_trainer.drafter_config import DFlashConfig, DrafterConfig
from drafter_trainer.formats.drafter_format import PublishedDrafter
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason


def check_copies(drafter: PublishedDrafter, tables: dict[str, Tensor]) -> None:
    """Refuse a drafter with an embedding or head of its own: the target's are used in training and decoding.

    Raises:
        SlipstreamError: TARGET_INCOMPATIBLE.
    """
    for name, copy in drafter.target_copies.items():
        table = tables.get(name, tables["embed_tokens.weight"]).cpu()
        narrow = copy.dtype if copy.itemsize <= table.itemsize else table.dtype
        if not torch.equal(copy.to(narrow), table.to(narrow)):
            difference = (copy.float() - table.float()).abs().max().item()
            raise SlipstreamError(
                f"the drafter brings a {name} of its own: it differs from the target's by up to {difference:.3g}, "
                "expected the same",
                reason=Reason.TARGET_INCOMPATIBLE,
                remedy="Give the target that the drafter was trained for.",
            )


def require_dflash(config: DrafterConfig, where: str) -> DFlashConfig:
    """The configuration, of the one architecture that the formats know.

    Raises:
        SlipstreamError: ENVIRONMENT_UNSUPPORTED.
    """
    if not isinstance(config, DFlashConfig):
        raise SlipstreamError(
            f"the drafter in {where} is of the architecture {config.architecture!r}; vLLM, SGLang and z-lab's code "
            f"serve {DFlashConfig.architecture!r} alone",
            reason=Reason.ENVIRONMENT_UNSUPPORTED,
            remedy="Measure it with slipstream eval; to serve it an engine needs code of its own.",
        )
    return config


def as_module(config: DFlashConfig, weights: dict[str, Tensor]) -> DFlashDrafter:
    """The drafter, float32, on the CPU."""
    drafter = DFlashDrafter(config)
    drafter.load_state_dict({name: weight.float() for name, weight in weights.items()})
    return drafter
