"""Held-out acceptance while a run trains: what decoding the evaluation prompts would accept, without the target.

Every token of the target's own greedy answers is an anchor, in packs of training's shape; the drafter is matched at
all of them, with the weights that would be deployed, and each answer is walked from block to block as decoding goes.
In float32 this is what `slipstream eval` counts. Nothing that training depends on changes: no weight, no optimizer
state, no random generator.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafter_trainer.anchors import Anchors
from drafter_trainer.checkpoint_state import HeldoutEstimate
from drafter_trainer.drafter_config import DrafterConfig
from drafter_trainer.heldout_packs import HeldoutPack, HeldoutStream, read_heldout_packs
from drafter_trainer.heldout_walk import Acceptance, Round, acceptance_of, walk
from drafter_trainer.step import TrainingStep
from drafter_trainer.target_link import TargetLink
from drafter_trainer.training_packs import TrainingPack, payload_shapes
from slipstream.heldout_rows import load_rows
from slipstream.run_spec.spec import RunSpec
from slipstream.wire.channel import TargetClient


@dataclass(frozen=True)
class HeldoutResult:
    """One measurement."""

    overall: Acceptance
    by_source: dict[str, Acceptance]
    seconds: float
    digest: str
    """Of the answers."""

    def record_fields(self) -> dict[str, Any]:
        """For the step's record."""
        return {
            "heldout_accepted_length": self.overall.accepted_length,
            "heldout_slot_acceptance": self.overall.slot_acceptance,
            "heldout_sources": {source: found.to_json() for source, found in self.by_source.items()},
            "heldout_seconds": self.seconds,
        }

    def log_fields(self) -> dict[str, Any]:
        """For people."""
        sources = {source: round(found.accepted_length, 3) for source, found in self.by_source.items()}
        return {"accepted_length": round(self.overall.accepted_length, 4), **sources, "seconds": round(self.seconds, 2)}

    def estimate(self) -> HeldoutEstimate:
        """For the checkpoint."""
        return HeldoutEstimate(
            accepted_length=self.overall.accepted_length,
            by_source={source: found.accepted_length for source, found in self.by_source.items()},
            answers=self.digest,
        )


class HeldoutEvaluation:
    """The packs of a run's held-out answers, and how to measure its drafter on them. For the training thread."""

    def __init__(
        self, packs: Sequence[HeldoutPack], digest: str, *, num_anchors: int, block_size: int, stop: threading.Event
    ) -> None:
        """`digest`: of the answers. `num_anchors`: of a training pack. `stop`: breaks a measurement off."""
        self._packs = packs
        self._digest = digest
        self._num_anchors = num_anchors
        self._block_size = block_size
        self._stop = stop

    def measure(self, step: TrainingStep) -> HeldoutResult | None:
        """Wait for the device and count; None when the run was told to stop meanwhile."""
        began = time.monotonic()
        walks: dict[str, list[list[Round]]] = defaultdict(list)
        with step.optimizer.deployed_in_place():
            for pack in self._packs:
                if self._stop.is_set():
                    return None
                matched = iter(self._matched(step, pack))
                for answer in pack.answers:
                    found = [next(matched) for _ in answer.positions]
                    walks[answer.source].append(walk(found, self._block_size))
        everything = [rounds for of_source in walks.values() for rounds in of_source]
        by_source = {source: acceptance_of(walks[source], self._block_size) for source in sorted(walks)}
        overall = acceptance_of(everything, self._block_size)
        return HeldoutResult(overall, by_source, time.monotonic() - began, self._digest)

    def _matched(self, step: TrainingStep, pack: HeldoutPack) -> list[int]:
        """Matches behind every token of the pack's answers but their last ones, in order."""
        positions = torch.tensor([place for answer in pack.answers for place in answer.positions], dtype=torch.int64)
        tensors = {name: tensor.to(step.device) for name, tensor in pack.tensors.items()}
        # All are launched before the host waits for the first.
        found = [
            step.matched(TrainingPack(-1, tensors, anchors.to(step.device))) for anchors in self._anchors(positions)
        ]
        if not found:
            return []
        matched: list[int] = torch.cat(found)[: len(positions)].tolist()
        return matched

    def _anchors(self, positions: Tensor) -> Iterator[Anchors]:
        """As many at once as a training pack has; the last ones are padded with invalid ones."""
        for chosen in positions.split(self._num_anchors) if len(positions) else ():
            padded = torch.zeros(self._num_anchors, dtype=torch.int64)
            padded[: len(chosen)] = chosen
            yield Anchors(padded, torch.arange(self._num_anchors) < len(chosen))


def prepare_heldout(
    spec: RunSpec, config: DrafterConfig, client: TargetClient, link: TargetLink
) -> HeldoutEvaluation | None:
    """Check the recipe's held-out answers and fetch their hidden states; None where it names none.

    Args:
        spec: of the run.
        config: of its drafter.
        client: connected; its `stop` ends all waiting.
        link: after its handshake, before it begins.

    Raises:
        SlipstreamError: DATA_INVALID, TARGET_FINGERPRINT_MISMATCH, OUT_OF_MEMORY; what the target server refuses.
    """
    if spec.eval.heldout is None:
        return None
    pack_tokens = spec.data.pack_tokens
    rows = load_rows(Path(spec.eval.heldout), target_fingerprint=link.fingerprint, pack_tokens=pack_tokens)
    shapes = payload_shapes(config.feature_names, pack_tokens, config.hidden_size)
    stream = HeldoutStream(spec, tuple(sorted(config.target_layer_ids)), shapes)
    packs = read_heldout_packs(client, link, stream, rows)
    return HeldoutEvaluation(
        packs,
        rows.digest,
        num_anchors=spec.train.anchors_per_pack,
        block_size=config.block_size,
        stop=client.stop,
    )
