"""The real step before the first pack: compiled, compared, run; only then do weights and optimizer get their values.

Every graph a run needs is compiled here, in the thread that will use it; afterwards compiling is an error. These are
the drafter with its backward once for each declared pack length, and the loss of a chunk. A run that measures held-out
acceptance has the drafter once more for each length, without gradients, and the matches of a chunk. A warm-up of less
than a step does not exist: `GradientCheck.add` and `TrainingStep.run` both end in a backward.

Packs are adversarial: no anchor at all, one, every one, every anchor crowded into a context of 512 tokens, and
documents of many lengths.
"""

import itertools
import logging
import time
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from drafter_trainer.anchors import draw_anchors
from drafter_trainer.device_copy import DeviceCopy
from drafter_trainer.drafter import INITIAL_STD
from drafter_trainer.flex_policy import CompilationFreeze, graphs_declared
from drafter_trainer.gradient_check import GradientCheck
from drafter_trainer.step import TrainingStep
from drafter_trainer.training_packs import PackPlan, StepBatch, TrainingPack
from slipstream.compiled_code import compiled_graphs
from slipstream.errors import SlipstreamError
from slipstream.plan.memory import MEASUREMENT
from slipstream.run_spec.reasons import Reason
from slipstream.telemetry.logs import log_event

_SHORT_CONTEXT = 512
# The divisors of many-document packs: a pack is cut at its third, fifth, ninth…, none of them a multiple of a tile.
_CUTS = (3, 5, 9, 17, 33)

_log = logging.getLogger(__name__)


def warm_up(step: TrainingStep, plan: PackPlan, feature_dtype: torch.dtype, *, vocab_size: int) -> None:
    """Compare gradients, then run the real step twice, with every pack in every length; forbid compilation. For CUDA.

    Weights and optimizer state are those of noise afterwards: load them next, in place.

    Raises:
        SlipstreamError: this machine cannot train the run: gradients are wrong, or a step compiled anew what it had
            compiled before (ENVIRONMENT_UNSUPPORTED), or a step on finite input is not finite (LOSS_NOT_FINITE).
    """
    started = time.monotonic()
    load_representable_weights(step)
    check_gradients(step, adversarial_batches(step.device, plan, feature_dtype, vocab_size=vocab_size))
    compared = time.monotonic()
    run_steps(step, adversarial_batches(step.device, plan, feature_dtype, vocab_size=vocab_size))
    match_blocks(step, adversarial_batches(step.device, plan, feature_dtype, vocab_size=vocab_size))
    graphs = compiled_graphs()
    run_steps(step, adversarial_batches(step.device, plan, feature_dtype, vocab_size=vocab_size))
    match_blocks(step, adversarial_batches(step.device, plan, feature_dtype, vocab_size=vocab_size))
    require_same_graphs(graphs)
    CompilationFreeze(plan.pack_lengths).freeze()
    log_event(
        _log,
        "info",
        "warmed_up",
        graphs=graphs,
        declared=", ".join(f"{name} {number}" for name, number in graphs_declared().items()),
        pack_lengths=plan.pack_lengths,
        gradients_seconds=round(compared - started, 1),
        seconds=round(time.monotonic() - started, 1),
    )


def require_same_graphs(before: int) -> None:
    """Refuse to go on when packs that have been there before were compiled again.

    Raises:
        SlipstreamError: ENVIRONMENT_UNSUPPORTED.
    """
    if compiled_graphs() != before:
        raise SlipstreamError(
            f"The same packs compiled {compiled_graphs() - before} more graphs when they came a second time.",
            reason=Reason.ENVIRONMENT_UNSUPPORTED,
            remedy="This torch guards on something that changes from step to step: report this with the log.",
        )


def load_representable_weights(step: TrainingStep) -> None:
    """Float32 masters that are numbers of the compute precision: the reference computes with the step's own weights."""
    step.load_weights(_DrawnWeights(step))


class _DrawnWeights(Mapping[str, Tensor]):
    """Weights as a new run's are distributed, each drawn where it goes when it is asked for. A billion draws on a CPU
    would take ten seconds."""

    def __init__(self, step: TrainingStep) -> None:
        self._parameters = dict(step.drafter.named_parameters())
        self._final_norm = step.frozen.final_norm
        self._generator = torch.Generator(step.device).manual_seed(0)

    def __getitem__(self, name: str) -> Tensor:
        parameter = self._parameters[name]
        drawn = torch.ones(parameter.shape, device=parameter.device)
        if parameter.dim() == 2:
            drawn.normal_(0.0, INITIAL_STD, generator=self._generator)
        elif name == "norm.weight":
            drawn.copy_(self._final_norm)
        return drawn.to(parameter.dtype).float()

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


def check_gradients(step: TrainingStep, batches: Iterator[tuple[str, StepBatch]]) -> None:
    """Compare the compiled drafter's gradients with dense attention's, over all packs together.

    Raises:
        SlipstreamError: ENVIRONMENT_UNSUPPORTED, they are wrong.
    """
    check = GradientCheck(step)
    for _, batch in batches:
        check.add(batch.packs[0])
    errors = check.require_right()
    if step.device.type == "cuda":
        # The reference's memory is nothing that training needs, nor counts as its peak.
        del check
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(step.device)
    log_event(
        _log, "info", "gradients_checked", tensors=len(errors.ours), nearest_to_bound=errors.in_words(errors.worst())
    )
    if errors.unexpected:
        words = "; ".join(map(errors.in_words, errors.unexpected[:3]))
        log_event(_log, "warning", "gradients_less_exact", tensors=len(errors.unexpected), than_expected=words)


def run_steps(step: TrainingStep, batches: Iterator[tuple[str, StepBatch]]) -> None:
    """Run the real step on each, waiting for its numbers.

    Raises:
        SlipstreamError: LOSS_NOT_FINITE.
    """
    for name, batch in batches:
        numbers = step.run(batch, learning_rate=1e-6).wait()
        if not numbers.applied:
            raise SlipstreamError(
                f"The warm-up step with {name} gave loss {numbers.acceptance.loss} and gradient norm "
                f"{numbers.gradient_norm} on finite input.",
                reason=Reason.LOSS_NOT_FINITE,
                remedy="A kernel is wrong on this machine: report what slipstream doctor prints.",
            )


def match_blocks(step: TrainingStep, batches: Iterator[tuple[str, StepBatch]]) -> None:
    """Match the blocks of each as an evaluation does, waiting for the result; nothing where the run measures nothing.

    Raises:
        SlipstreamError: ENVIRONMENT_UNSUPPORTED, a block without an anchor counts, or one counts more than it has.
    """
    if not step.measures:
        return
    for name, batch in batches:
        pack = batch.packs[0]
        step.memory.begin()
        matched = step.matched(pack)
        step.memory.ended(MEASUREMENT, len(pack.tensors["input_ids"]))
        wrong = (matched < 0) | (matched >= step.drafter.config.block_size) | ((matched > 0) & ~pack.anchors.valid)
        if bool(wrong.any()):
            raise SlipstreamError(
                f"Matching the blocks of {name} counted {int(wrong.sum())} of them wrong.",
                reason=Reason.ENVIRONMENT_UNSUPPORTED,
                remedy="A kernel is wrong on this machine: report what slipstream doctor prints, or train without "
                "eval.heldout.",
            )


def adversarial_batches(
    device: torch.device, plan: PackPlan, feature_dtype: torch.dtype, *, vocab_size: int
) -> Iterator[tuple[str, StepBatch]]:
    """(what is special, a step's packs), for every declared pack length."""
    for tokens in plan.pack_lengths:
        for number, (name, supervised, lengths) in enumerate(_cases(tokens)):
            pack = _pack(plan.shapes_of(tokens), supervised, lengths, vocab_size)
            anchors = draw_anchors(pack["loss_mask"], pack["document_ids"], plan.num_anchors, 0, number)
            moved = DeviceCopy(device).to_device(pack) | _features(
                plan.shapes_of(tokens), sum(lengths), feature_dtype, device
            )
            training_pack = TrainingPack(number, moved, anchors.to(device))
            yield f"{name}, {tokens} tokens", StepBatch(0, (training_pack,) * plan.packs_per_step)


def _cases(tokens: int) -> tuple[tuple[str, int, tuple[int, ...]], ...]:
    """What is special, how many of the first tokens are supervised, the lengths of the documents."""
    short = min(_SHORT_CONTEXT, tokens)
    cuts = sorted({tokens // divisor for divisor in _CUTS if tokens // divisor > 0})
    bounds = (0, *cuts, tokens)
    many = tuple(end - start for start, end in itertools.pairwise(bounds))
    return (
        ("no valid anchor", 0, (tokens,)),
        ("one valid anchor", 2, (tokens,)),
        ("every anchor", tokens, (tokens,)),
        (f"every anchor in {short} tokens", short, (short,)),
        (f"{len(many)} documents", tokens, many),
    )


def _pack(
    shapes: dict[str, tuple[int, ...]], supervised: int, lengths: tuple[int, ...], vocab_size: int
) -> dict[str, Tensor]:
    """Documents of these lengths, then padding; without features. On the CPU."""
    (tokens,) = shapes["input_ids"]
    used = torch.tensor(lengths)
    padding = tokens - int(used.sum())
    generator = torch.Generator().manual_seed(0)
    documents = torch.repeat_interleave(torch.arange(len(lengths)), used)
    positions = torch.cat([torch.arange(length) for length in lengths])

    def padded(values: Tensor, value: int = 0) -> Tensor:
        return torch.nn.functional.pad(values.int(), (0, padding), value=value)

    return {
        "input_ids": padded(torch.randint(vocab_size, (tokens - padding,), generator=generator)),
        "loss_mask": (torch.arange(tokens) < supervised).to(torch.uint8),
        "document_ids": padded(documents, -1),
        "position_ids": padded(positions),
    }


def _features(
    shapes: dict[str, tuple[int, ...]], used: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Noise for the target's hidden states, zeros on padding. Drawn on the device: a CPU takes a second per pack."""
    generator = torch.Generator(device).manual_seed(1)
    features = {}
    for name, shape in shapes.items():
        if len(shape) == 2:
            features[name] = torch.randn(shape, generator=generator, device=device).to(dtype)
            features[name][used:] = 0
    return features
