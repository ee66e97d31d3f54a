"""The real step before the first pack: compiled, run, checked; only then do weights and optimizer get their values.

Every graph a run needs is compiled here, in the thread that will use it; afterwards compiling is an error. Packs are
adversarial: no anchor at all, one, every one, and every anchor crowded into a context of 512 tokens.
"""

import logging
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from drafter_trainer.anchors import draw_anchors
from drafter_trainer.batch_source import PackPlan, StepBatch, TrainingPack
from drafter_trainer.device_copy import DeviceCopy
from drafter_trainer.flex_policy import CompilationFreeze
from drafter_trainer.step import TrainingStep
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.telemetry.logs import log_event

_ROUNDS = 2
_SHORT_CONTEXT = 512

_log = logging.getLogger(__name__)


def warm_up(step: TrainingStep, plan: PackPlan, feature_dtype: torch.dtype, *, vocab_size: int) -> None:
    """Run the real step on adversarial packs, twice each, then forbid compilation. For CUDA.

    Weights and optimizer state are those of noise afterwards: load them next, in place.

    Raises:
        SlipstreamError: LOSS_NOT_FINITE when a step on finite input is not finite: a kernel is wrong on this machine.
    """
    started = time.monotonic()
    step.load_weights(step.first_weights(seed=0))
    for _ in range(_ROUNDS):
        for name, batch in adversarial_batches(step.device, plan, feature_dtype, vocab_size=vocab_size):
            numbers = step.run(batch, learning_rate=1e-6).wait()
            if not numbers.applied:
                raise SlipstreamError(
                    f"The warm-up step with {name} gave loss {numbers.acceptance.loss} and gradient norm "
                    f"{numbers.gradient_norm} on finite input.",
                    reason=Reason.LOSS_NOT_FINITE,
                    remedy="A kernel is wrong on this machine: report what slipstream doctor prints.",
                )
    graphs = CompilationFreeze().freeze()
    log_event(_log, "info", "warmed_up", graphs=graphs, seconds=round(time.monotonic() - started, 1))


def adversarial_batches(
    device: torch.device, plan: PackPlan, feature_dtype: torch.dtype, *, vocab_size: int
) -> Iterator[tuple[str, StepBatch]]:
    """(what is special, a step's packs), in the shapes of `plan`."""
    tokens = plan.tensor_shapes["input_ids"][0]
    short = min(_SHORT_CONTEXT, tokens)
    # What is special, how many of the first tokens are supervised, the length of the document.
    cases = (
        ("no valid anchor", 0, tokens),
        ("one valid anchor", 2, tokens),
        ("every anchor", tokens, tokens),
        (f"every anchor in {short} tokens", short, short),
    )
    generator = torch.Generator().manual_seed(0)
    copy = DeviceCopy(device)
    for number, (name, supervised, length) in enumerate(cases):
        mask = torch.arange(tokens) < supervised
        pack = _pack(plan, mask, length, feature_dtype, torch.randint(vocab_size, (tokens,), generator=generator))
        anchors = draw_anchors(pack["loss_mask"], pack["document_ids"], plan.num_anchors, 0, number)
        training_pack = TrainingPack(number, copy.to_device(pack), anchors.to(device))
        yield name, StepBatch(0, (training_pack,) * plan.packs_per_step)


def _pack(
    plan: PackPlan, mask: Tensor, length: int, feature_dtype: torch.dtype, token_ids: Tensor
) -> dict[str, Tensor]:
    """One document of `length` tokens, then padding; noise for features."""
    tokens = mask.numel()
    inside = torch.arange(tokens) < length
    pack = {
        "input_ids": torch.where(inside, token_ids, 0).int(),
        "loss_mask": mask.to(torch.uint8),
        "document_ids": torch.where(inside, 0, -1).int(),
        "position_ids": torch.where(inside, torch.arange(tokens), 0).int(),
    }
    generator = torch.Generator().manual_seed(1)
    for name, shape in plan.tensor_shapes.items():
        if name not in pack:
            pack[name] = torch.randn(shape, generator=generator).to(feature_dtype) * inside[:, None]
    return pack
