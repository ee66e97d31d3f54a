"""One training step: the packs of a step in, an optimizer update out, and the numbers that say how it went.

Static shapes throughout. On CUDA the host never waits inside a step: whether it is applied is decided on the device,
and its numbers come back in one small copy that is read while the next step runs.
"""

import logging
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, reduce

import torch
from torch import Tensor

from drafter_trainer.acceptance import AcceptanceMetrics, StepSums
from drafter_trainer.anchors import Anchors, BlockTargets
from drafter_trainer.block_mask import BlockAttention
from drafter_trainer.cuda_graph import Recorder, wants_graphs
from drafter_trainer.drafter import initialise_weights
from drafter_trainer.drafter_config import DrafterConfig
from drafter_trainer.feature_noise import FeatureNoise
from drafter_trainer.fp8 import Fp8Products
from drafter_trainer.frozen_head import FrozenHead
from drafter_trainer.frozen_weights import FrozenWeights
from drafter_trainer.fused_adamw import adamw_update
from drafter_trainer.heldout_matches import ChunkMatches, matched_slots, matches_of_chunk
from drafter_trainer.loss import ChunkLoss, LossSums, drafter_loss, loss_of_chunk, resolve_loss_config
from drafter_trainer.memory import MemoryMeter
from drafter_trainer.optimizer import DrafterOptimizer, FusedUpdate
from drafter_trainer.pack_buckets import declared_lengths
from drafter_trainer.pack_layout import ROW_NAMES, LaidOut, PackLayout
from drafter_trainer.target_states import TargetStates, target_states
from drafter_trainer.training_packs import StepBatch, TrainingPack
from slipstream.run_spec.spec import RunSpec
from slipstream.telemetry.logs import log_event
from slipstream.wire.tensor_names import LAST_HIDDEN_STATE

COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_ANCHOR_POSITIONS, _ANCHOR_VALID = "anchor_positions", "anchor_valid"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepNumbers:
    """A finished step, on the host."""

    acceptance: AcceptanceMetrics
    gradient_norm: float
    """Before clipping."""
    applied: bool
    not_finite: tuple[int, ...]
    """Packs whose loss was not finite; all of the step when only its gradient was not."""


class PendingStep:
    """A step that may still run on the device."""

    def __init__(self, batch: StepBatch, learning_rate: float, values: Tensor) -> None:
        """`values`: float32, StepSums ++ [gradient norm, applied] ++ numerator per pack."""
        self.step = batch.step
        self.sequence_numbers = tuple(pack.sequence_number for pack in batch.packs)
        self.learning_rate = learning_rate
        self._event: torch.cuda.Event | None = None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._values = values

    def wait(self) -> StepNumbers:
        """Wait for the device, and read."""
        if self._event is not None:
            self._event.synchronize()
        num_packs = len(self.sequence_numbers)
        split = self._values.numel() - num_packs - 2
        norm, applied, *numerators = self._values[split:].tolist()
        not_finite = [n for n, value in zip(self.sequence_numbers, numerators, strict=True) if not math.isfinite(value)]
        return StepNumbers(
            acceptance=AcceptanceMetrics.of(StepSums(self._values[:split])),
            gradient_norm=norm,
            applied=applied == 1.0,
            not_finite=() if applied == 1.0 else tuple(not_finite or self.sequence_numbers),
        )


class TrainingStep:
    """Drafter, loss and optimizer of a run on one device. One thread uses it, always the same."""

    def __init__(
        self, config: DrafterConfig, frozen: FrozenWeights, spec: RunSpec, pack_lengths: tuple[int, ...] | None = None
    ) -> None:
        """Weights are undefined until `load_weights`. `pack_lengths`: the buckets; default: data.pack_tokens alone."""
        self.pack_lengths = declared_lengths(pack_lengths or (spec.data.pack_tokens,))
        self.device = frozen.embedding.device
        self._config = config
        self.frozen = frozen
        self._compute_dtype = COMPUTE_DTYPES[spec.train.precision]
        with torch.device("meta"):
            drafter = config.build()
        self.drafter = drafter.to_empty(device=self.device)
        if spec.recomputed_layers:
            self.drafter.recompute_layers(spec.recomputed_layers)
        self._recorder = self._make_recorder(spec)
        self.optimizer = DrafterOptimizer(
            self.drafter, spec.optimizer, compute_dtype=self._compute_dtype, fused=self._fused_update(spec)
        )
        # Where the device reads the learning rate, so that neither a compiled nor a recorded update depends on it.
        self._rate = torch.zeros((), device=self.device) if self.device.type == "cuda" else None
        attention = self.drafter.attention_layout(spec.train.attention)
        self._layout = PackLayout(attention, config.block_size, config.mask_token_id)
        self._loss_config = resolve_loss_config(
            spec.loss,
            block_size=config.block_size,
            vocab_size=config.vocab_size,
            logit_soft_cap=config.logit_soft_cap,
            device=self.device,
        )
        self._noise = FeatureNoise(spec.train.feature_noise, spec.train.seed, self.device)
        self._needs_target_states = spec.loss.needs_target_distribution
        self._reads = ROW_NAMES + ((LAST_HIDDEN_STATE,) if self._needs_target_states else ())
        self._packs_per_step = spec.train.packs_per_step
        self.in_fp8 = spec.train.fp8
        fp8 = Fp8Products(self.drafter, frozen.head) if self.in_fp8 else None
        self._head: FrozenHead = frozen.head if fp8 is None else fp8.head
        round_weights = None if fp8 is None else fp8.round_weights
        self.measures = spec.eval.heldout is not None
        """Whether `matched` is called, and therefore warmed up."""
        self._lay_out: Callable[[Mapping[str, Tensor], Anchors], LaidOut] = self._layout
        self._forward = self._drafting = self._hidden_states
        self._chunk_loss: ChunkLoss | None = None
        self._chunk_matches: ChunkMatches | None = None
        if self.device.type == "cuda":
            round_weights = self._compile(round_weights)
        if round_weights is not None:
            self.optimizer.on_new_weights(round_weights)
        self.memory = MemoryMeter(self.device)
        """Open during the warm-up."""

    def run(self, batch: StepBatch, learning_rate: float) -> PendingStep:
        """Train one step. Gradients of the packs' loss numerators are summed in float32 and divided by the step's
        weight at the end, so that every counted slot of the step weighs the same whichever pack it is in.

        Args:
            batch: at least one pack.
            learning_rate: for this step.
        """
        assert batch.packs, "a step without packs is skipped, not run"
        sums = []
        for index, pack in enumerate(batch.packs):
            inputs, is_first = self._inputs_of(pack), index == 0
            key = ("pack", len(inputs["input_ids"]), "first" if is_first else "later")
            sums.append(self._recorder(key, partial(self._train_pack, is_first=is_first), inputs))
        missing = self._packs_per_step - len(sums)
        sums += [torch.zeros_like(sums[0])] * missing
        if self._rate is not None:
            self._rate.fill_(learning_rate)
        update = partial(self._update, learning_rate=learning_rate if self._rate is None else self._rate)
        values = self._recorder(("update", len(sums)), update, {str(i): vector for i, vector in enumerate(sums)})
        return PendingStep(batch, learning_rate, values[: len(values) - max(0, missing)])

    @torch.no_grad()
    def matched(self, pack: TrainingPack) -> Tensor:
        """Drafted tokens in a row that each block gets right, int64 [A]; nothing is learned, and no noise is added."""
        inputs = {name: pack.tensors[name] for name in (*ROW_NAMES, *self._config.feature_names)}
        laid_out = self._laid_out(inputs, pack.anchors)
        hidden = self._hidden_of(inputs, pack.anchors, laid_out, self._drafting)
        return matched_slots(hidden, self._head, laid_out.targets, self._loss_config, self._chunk_matches)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Set the float32 masters in place and clear the optimizer's state."""
        self.optimizer.load_weights(weights)

    def first_weights(self, seed: int) -> dict[str, Tensor]:
        """What a new run starts with, float32 on the CPU; a function of the sizes, the seed and the target's norm."""
        with torch.device("meta"):
            drafter = self._config.build()
        drafter = drafter.to_empty(device="cpu")
        initialise_weights(drafter, seed, self.frozen.final_norm.cpu())
        return {name: parameter.detach() for name, parameter in drafter.named_parameters()}

    def features(self, pack: TrainingPack) -> Tensor:
        """What the drafter reads of the target, with the run's noise: [T, n·D], compute precision."""
        return self._joined(self._captured(self._inputs_of(pack)))

    def block_targets(self, pack: TrainingPack) -> BlockTargets:
        """What the blocks of a pack read and must predict."""
        return self._laid_out(self._inputs_of(pack), pack.anchors).targets

    def hidden_states(self, pack: TrainingPack, targets: BlockTargets) -> Tensor:
        """The drafter's output [A·B, D], through the function that this run has compiled, ready for a backward."""
        inputs = self._inputs_of(pack)
        masks = self._laid_out(inputs, pack.anchors).masks
        return self._hidden_of(inputs, pack.anchors, LaidOut(targets, masks), self._forward)

    def _compile(self, round_weights: Callable[[], None] | None) -> Callable[[], None] | None:
        """Compile all that runs on packs; returns what rounds FP8's weights, compiled."""
        # Here, because it loads the compiler, which a CPU run has no use for and waits two seconds for.
        from drafter_trainer.flex_policy import compile_owned

        # As many graphs as there are shapes: the limit catches one more. A chunk of the loss has one shape.
        shapes = len(self.pack_lengths)
        self._lay_out = compile_owned(self._layout.__call__, name="pack_layout", graphs=shapes)
        self._forward = compile_owned(self._hidden_states, name="drafter", graphs=shapes)
        self._chunk_loss = compile_owned(loss_of_chunk, name="chunk_loss", graphs=1)
        if self.measures:
            # A graph without gradients is another graph, so that measuring has its own compiled functions.
            self._drafting = compile_owned(self._hidden_states, name="drafter_without_gradients", graphs=shapes)
            self._chunk_matches = compile_owned(matches_of_chunk, name="chunk_matches", graphs=1)
        return None if round_weights is None else compile_owned(round_weights, name="round_weights", graphs=1)

    def _make_recorder(self, spec: RunSpec) -> Recorder:
        parameters = sum(parameter.numel() for parameter in self.drafter.parameters())
        enabled, why = wants_graphs(spec, self.device, parameters)
        if self.device.type == "cuda":
            log_event(_log, "info", "cuda_graphs", used=enabled, because=why)
        return Recorder(enabled)

    def _fused_update(self, spec: RunSpec) -> FusedUpdate | None:
        """AdamW in one pass, on CUDA. A recorded step keeps its gradients where the next graph finds them."""
        if self.device.type != "cuda" or spec.optimizer.kind != "adamw":
            return None
        from drafter_trainer.flex_policy import compile_owned

        sums_gradients = self._recorder.enabled or spec.train.packs_per_step > 1
        # A graph for matrices and one for norms, or one for each size of a parameter.
        sizes = {parameter.numel() for parameter in self.drafter.parameters()}
        update = compile_owned(adamw_update, name="adamw", graphs=2 if sums_gradients else len(sizes))
        return FusedUpdate(update, sums_gradients)

    def _inputs_of(self, pack: TrainingPack) -> dict[str, Tensor]:
        """All that a step reads of a pack, by name; the features with the run's noise."""
        names = self._config.feature_names
        features = self._noise.add([pack.tensors[name] for name in names], pack.sequence_number)
        return {
            **{name: pack.tensors[name] for name in self._reads},
            **dict(zip(names, features, strict=True)),
            _ANCHOR_POSITIONS: pack.anchors.positions,
            _ANCHOR_VALID: pack.anchors.valid,
        }

    def _train_pack(self, inputs: Mapping[str, Tensor], *, is_first: bool) -> Tensor:
        """Forward, loss, backward; adds the gradients and returns the pack's `StepSums`."""
        self.memory.begin()
        tokens = len(inputs["input_ids"])
        sums = self._pack_loss(inputs, tokens)
        gradients = torch.autograd.grad(sums.numerator, self.optimizer.parameters)
        self.optimizer.add_gradients(gradients, is_first=is_first)
        self.memory.ended("backward", tokens)
        return StepSums.of(sums).values

    def _pack_loss(self, inputs: Mapping[str, Tensor], tokens: int) -> LossSums:
        """A function of its own, so that the hidden states are gone before the backward: nothing there needs them."""
        anchors = Anchors(inputs[_ANCHOR_POSITIONS], inputs[_ANCHOR_VALID])
        laid_out = self._laid_out(inputs, anchors)
        hidden = self._hidden_of(inputs, anchors, laid_out, self._forward)
        self.memory.ended("forward", tokens)
        target = self._target_states(inputs, anchors)
        sums = drafter_loss(hidden, self._head, laid_out.targets, self._loss_config, self._chunk_loss, target)
        self.memory.ended("loss", tokens)
        return sums

    def _update(self, sums: Mapping[str, Tensor], *, learning_rate: float | Tensor) -> Tensor:
        """The optimizer's step from the packs' sums; what `PendingStep` reads."""
        packs = [StepSums(vector) for vector in sums.values()]
        totals = reduce(operator.add, packs)
        numerator, weight = totals.values[0], totals.values[1]
        # Slot 1 of a block weighs 1 under every scheme, so the weight is 0 or at least 1: nothing else is changed here.
        applied = self.optimizer.apply(learning_rate, numerator, weight.clamp(min=1.0))
        self.memory.ended("optimizer")
        numerators = [pack.values[0] for pack in packs]
        return torch.cat((totals.values, torch.stack((applied.gradient_norm, applied.applied, *numerators))))

    def _laid_out(self, inputs: Mapping[str, Tensor], anchors: Anchors) -> LaidOut:
        # Integers only; the mode is fixed because a compiled function has a graph for each.
        with torch.no_grad():
            return self._lay_out({name: inputs[name] for name in ROW_NAMES}, anchors)

    def _hidden_of(
        self, inputs: Mapping[str, Tensor], anchors: Anchors, laid_out: LaidOut, forward: Callable[..., Tensor]
    ) -> Tensor:
        attention = self._layout.attention(laid_out, inputs, anchors)
        block_ids, block_positions = laid_out.targets.block_ids, laid_out.targets.block_positions
        return forward(self._captured(inputs), block_ids, inputs["position_ids"], block_positions, attention)

    def _target_states(self, inputs: Mapping[str, Tensor], anchors: Anchors) -> TargetStates | None:
        if not self._needs_target_states:
            return None
        final_norm = self.frozen.final_norm, self._config.rms_norm_eps
        return target_states(
            inputs[LAST_HIDDEN_STATE], anchors, self._config.block_size, final_norm, self._compute_dtype
        )

    def _captured(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        return tuple(inputs[name] for name in self._config.feature_names)

    def _joined(self, captured: tuple[Tensor, ...]) -> Tensor:
        return torch.cat(captured, dim=-1).to(self._compute_dtype)

    def _hidden_states(
        self,
        captured: tuple[Tensor, ...],
        block_ids: Tensor,
        positions: Tensor,
        block_positions: Tensor,
        attention: BlockAttention,
    ) -> Tensor:
        """captured: n of [T, D]; block_ids and block_positions [A, B], positions [T] → [A·B, D]."""
        embeddings = self.frozen.embed(block_ids.flatten())
        return self.drafter(self._joined(captured), embeddings, positions, block_positions.flatten(), attention)
