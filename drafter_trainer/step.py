"""One training step: the packs of a step in, an optimizer update out, and the numbers that say how it went.

Static shapes throughout. On CUDA the host never waits inside a step: whether it is applied is decided on the device,
and its numbers come back in one small copy that is read while the next step runs.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from drafter_trainer.acceptance import AcceptanceMetrics, StepSums
from drafter_trainer.anchors import BlockTargets, build_block_targets
from drafter_trainer.batch_source import StepBatch, TrainingPack
from drafter_trainer.block_mask import BlockAttention, build_block_attention
from drafter_trainer.drafter import DFlashDrafter, initialise_weights
from drafter_trainer.drafter_config import DrafterConfig
from drafter_trainer.feature_noise import FeatureNoise
from drafter_trainer.fp8 import Fp8Products
from drafter_trainer.frozen_head import FrozenHead
from drafter_trainer.frozen_weights import FrozenWeights
from drafter_trainer.loss import LossSums, drafter_loss, loss_of_chunk, resolve_loss_config
from drafter_trainer.optimizer import DrafterOptimizer
from drafter_trainer.pack_buckets import declared_lengths
from drafter_trainer.target_states import LAST_HIDDEN_STATE, TargetStates, target_states
from slipstream.run_spec.spec import RunSpec

COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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
            drafter = DFlashDrafter(config)
        self.drafter = drafter.to_empty(device=self.device)
        self.optimizer = DrafterOptimizer(
            self.drafter,
            spec.optimizer,
            compute_dtype=self._compute_dtype,
            packs_per_step=spec.train.packs_per_step,
        )
        self._layout = self.drafter.attention_layout(spec.train.attention)
        self._loss_config = resolve_loss_config(
            spec.loss,
            block_size=config.block_size,
            vocab_size=config.vocab_size,
            logit_soft_cap=config.logit_soft_cap,
            device=self.device,
        )
        self._noise = FeatureNoise(spec.train.feature_noise, spec.train.seed, self.device)
        self._needs_target_states = spec.loss.needs_target_distribution
        fp8 = Fp8Products(self.drafter, frozen.head) if spec.train.fp8 else None
        self._head: FrozenHead = frozen.head if fp8 is None else fp8.head
        round_weights = None if fp8 is None else fp8.round_weights
        self._forward = self._hidden_states
        self._chunk_loss = None
        if self.device.type == "cuda":
            # Here, because it loads the compiler, which a CPU run has no use for and waits two seconds for.
            from drafter_trainer.flex_policy import compile_owned

            # As many graphs as there are shapes: the limit catches one more. A chunk of the loss has one shape.
            self._forward = compile_owned(self._hidden_states, name="drafter", graphs=len(self.pack_lengths))
            self._chunk_loss = compile_owned(loss_of_chunk, name="chunk_loss", graphs=1)
            if round_weights is not None:
                round_weights = compile_owned(round_weights, name="round_weights", graphs=1)
        if round_weights is not None:
            self.optimizer.on_new_weights(round_weights)

    def run(self, batch: StepBatch, learning_rate: float) -> PendingStep:
        """Train one step. Gradients of the packs' loss numerators are summed in float32 and divided by the step's
        weight at the end, so that every counted slot of the step weighs the same whichever pack it is in.

        Args:
            batch: at least one pack.
            learning_rate: for this step.
        """
        totals: StepSums | None = None
        numerators: list[Tensor] = []
        for pack in batch.packs:
            sums = self._pack_loss(pack)
            self.optimizer.add_gradients(torch.autograd.grad(sums.numerator, self.optimizer.parameters))
            totals = StepSums.of(sums) if totals is None else totals + StepSums.of(sums)
            numerators.append(sums.numerator.detach())
        assert totals is not None, "a step without packs is skipped, not run"
        numerator, weight = totals.values[0], totals.values[1]
        # Slot 1 of a block weighs 1 under every scheme, so the weight is 0 or at least 1: nothing else is changed here.
        applied = self.optimizer.apply(learning_rate, numerator, weight.clamp(min=1.0))
        values = torch.cat((totals.values, torch.stack((applied.gradient_norm, applied.applied, *numerators))))
        return PendingStep(batch, learning_rate, values)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Set the float32 masters in place and clear the optimizer's state."""
        self.optimizer.load_weights(weights)

    def first_weights(self, seed: int) -> dict[str, Tensor]:
        """What a new run starts with, float32 on the CPU; a function of the sizes, the seed and the target's norm."""
        with torch.device("meta"):
            drafter = DFlashDrafter(self._config)
        drafter = drafter.to_empty(device="cpu")
        initialise_weights(drafter, seed, self.frozen.final_norm.cpu())
        return {name: parameter.detach() for name, parameter in drafter.named_parameters()}

    def features(self, pack: TrainingPack) -> Tensor:
        """What the drafter reads of the target, with the run's noise: [T, n·D], compute precision."""
        captured = [pack.tensors[name] for name in self._config.feature_names]
        return torch.cat(self._noise.add(captured, pack.sequence_number), dim=-1).to(self._compute_dtype)

    def hidden_states(self, pack: TrainingPack, targets: BlockTargets) -> Tensor:
        """The drafter's output [A·B, D], through the function that this run has compiled, ready for a backward."""
        positions = pack.tensors["position_ids"]
        attention = build_block_attention(self._layout, pack.anchors, positions)
        return self._forward(self.features(pack), targets.block_ids, positions, targets.block_positions, attention)

    def block_targets(self, pack: TrainingPack) -> BlockTargets:
        """What the blocks of a pack read and must predict."""
        config = self._config
        return build_block_targets(
            pack.tensors, pack.anchors, block_size=config.block_size, mask_token_id=config.mask_token_id
        )

    def _pack_loss(self, pack: TrainingPack) -> LossSums:
        targets = self.block_targets(pack)
        hidden = self.hidden_states(pack, targets)
        return drafter_loss(hidden, self._head, targets, self._loss_config, self._chunk_loss, self._target_states(pack))

    def _target_states(self, pack: TrainingPack) -> TargetStates | None:
        if not self._needs_target_states:
            return None
        final_norm = self.frozen.final_norm, self._config.rms_norm_eps
        return target_states(
            pack.tensors[LAST_HIDDEN_STATE], pack.anchors, self._config.block_size, final_norm, self._compute_dtype
        )

    def _hidden_states(
        self,
        features: Tensor,
        block_ids: Tensor,
        positions: Tensor,
        block_positions: Tensor,
        attention: BlockAttention,
    ) -> Tensor:
        """features [T, n·D], block_ids and block_positions [A, B], positions [T] → [A·B, D]."""
        embeddings = self.frozen.embed(block_ids.flatten())
        return self.drafter(features, embeddings, positions, block_positions.flatten(), attention)
