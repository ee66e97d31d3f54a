"""Our side: the `TrainingStep` of a trainer, prepared and warmed up as `drafter-trainer run` does it."""

from collections.abc import Mapping

import torch

from benchmarks.peers.side import SideUnavailableError
from benchmarks.peers.workload import (
    LEARNING_RATE,
    Pack,
    Size,
    compute_dtype,
    drafter_config,
    drafter_weights,
    frozen_weights,
    run_spec,
)
from drafter_trainer.build_step import prepare_device
from drafter_trainer.step import PendingStep, TrainingStep
from drafter_trainer.training_packs import PackPlan, StepBatch, TrainingPack, payload_shapes
from slipstream.run_spec.spec import RunSpec, TrainSpec
from slipstream.wire.tensor_names import LAST_HIDDEN_STATE

PACKS_HELD = 4


class OurSide:
    """One step is in flight while the host launches the next, as in the training loop."""

    split_features = True

    def __init__(
        self,
        size: Size,
        device: torch.device,
        *,
        fp8: bool = False,
        cuda_graphs: bool = False,
        activation_checkpointing: bool | int = False,
        changes: Mapping[str, Mapping[str, object]] | None = None,
    ) -> None:
        """
        `changes`: of the recipe's other tables, by table.

        Raises:
            SideUnavailableError: fp8 is asked for and this version has no such key.
        """
        if fp8 and "fp8" not in TrainSpec.model_fields:
            raise SideUnavailableError("this version has no train.fp8")
        train = {"cuda_graphs": cuda_graphs, "activation_checkpointing": activation_checkpointing}
        spec = run_spec(size, device, **train, **({"fp8": True} if fp8 else {}))
        spec = RunSpec.model_validate(spec.model_dump() | dict(changes or {}))
        self._reads_last_state = spec.loss.needs_target_distribution
        if device.type == "cuda":
            prepare_device(spec)
        config = drafter_config(size)
        self.training_step = TrainingStep(config, frozen_weights(size, device), spec, size.buckets)
        if device.type == "cuda":
            from drafter_trainer.warmup import warm_up

            plan = pack_plan(size, last_hidden_state=self._reads_last_state)
            warm_up(self.training_step, plan, compute_dtype(device), vocab_size=size.vocab)
        # It resets the allocator's peaks at every phase, and the benchmark reads them.
        self.training_step.memory.close()
        self.training_step.load_weights(drafter_weights(size, device))
        self.description = (
            f"drafter_trainer.step.TrainingStep, compiled, {'fp8' if fp8 else spec.train.precision} products, "
            f"fp32 masters, {spec.optimizer.kind}{', as CUDA graphs' if cuda_graphs else ''}"
        )
        self._in_flight: PendingStep | None = None
        self._newest: PendingStep | None = None
        self._steps = 0

    def step(self, pack: Pack) -> None:
        """Launch a step, then look at the one before."""
        pending = self.training_step.run(StepBatch(self._steps, (self._of(pack),)), LEARNING_RATE)
        self._steps += 1
        if self._in_flight is not None:
            self._in_flight.wait()
        self._in_flight = self._newest = pending

    def last_loss(self) -> float:
        """Loss of the newest step."""
        assert self._newest is not None
        numbers = self._newest.wait()
        if not numbers.applied:
            raise RuntimeError(f"a step was not applied: gradient norm {numbers.gradient_norm}")
        return numbers.acceptance.loss

    def forward_backward(self, pack: Pack) -> None:
        """What a step does with one pack before the optimizer updates anything."""
        step = self.training_step
        step._train_pack(step._inputs_of(self._of(pack)), is_first=True)

    def _of(self, pack: Pack) -> TrainingPack:
        tensors = dict(pack.tensors)
        if self._reads_last_state:
            # Any states do: what they cost does not depend on what they say.
            tensors[LAST_HIDDEN_STATE] = next(t for name, t in tensors.items() if name.startswith("hidden_states."))
        return TrainingPack(self._steps, tensors, pack.anchors)

    def optimizer_bytes(self) -> int:
        """Memory that only an optimizer needs: float32 masters, moments, and gradient where there is one."""
        optimizer = self.training_step.optimizer
        tensors = (*optimizer.weights().values(), *optimizer.state_tensors().values(), optimizer._gradient)
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        return sum(storages.values())


def pack_plan(size: Size, *, last_hidden_state: bool = False) -> PackPlan:
    """What the warm-up must know of the packs to come."""
    config, (*shorter, longest) = drafter_config(size), size.buckets
    states = (*config.feature_names, LAST_HIDDEN_STATE) if last_hidden_state else config.feature_names
    return PackPlan(
        first_sequence_number=0,
        packs_per_step=1,
        total_steps=0,
        tensor_shapes=payload_shapes(states, longest, size.hidden),
        num_anchors=size.anchors,
        seed=0,
        prefetch_packs=PACKS_HELD,
        lease_seconds=60.0,
        shorter_lengths=tuple(shorter),
    )
