"""A trained drafter, whether a checkpoint or a published one, for whoever decodes with it."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from drafter_trainer.checkpoint import load_drafter_weights
from drafter_trainer.drafter_config import DrafterConfig
from drafter_trainer.evaluation.target_check import check_fits
from drafter_trainer.formats.drafter_format import PublishedDrafter
from drafter_trainer.formats.module import as_module, check_copies
from drafter_trainer.formats.published import read_published
from drafter_trainer.formats.published_run import is_published
from drafter_trainer.formats.self_test import PROMPTS, TargetReader, run_self_test
from drafter_trainer.formats.tensors import check_parameters
from slipstream.target_facts import read_frozen_weights
from slipstream.target_loading import LoadedTarget
from slipstream.wire.target_config import TargetConfig


@dataclass(frozen=True)
class OpenedDrafter:
    """Read and checked, but not yet against a target."""

    directory: Path
    weights: dict[str, Tensor]
    config: DrafterConfig | None
    """Of a checkpoint."""
    published: PublishedDrafter | None

    def for_target(self, target: LoadedTarget, facts: TargetConfig, end_ids: frozenset[int]) -> DrafterConfig:
        """The configuration; a published drafter decodes a prompt first, to show that it was read rightly.

        Args:
            target: that decodes.
            facts: its description.
            end_ids: tokens that end an answer.

        Raises:
            SlipstreamError: TARGET_INCOMPATIBLE; CHECKPOINT_INVALID, the self-test failed.
        """
        if self.published is None:
            assert self.config is not None
            check_fits(self.config, facts)
            return self.config
        config = self.published.config.for_target(facts)
        check_copies(self.published, read_frozen_weights(target.model, facts))
        reader = TargetReader(target, facts.embedding_scale, end_ids)
        run_self_test(reader, as_module(config, self.weights), self.directory, PROMPTS[:1])
        return config


def open_drafter(directory: Path) -> OpenedDrafter:
    """Read a checkpoint directory, or one in any of the formats.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID.
    """
    if is_published(directory):
        published = read_published(directory)
        return OpenedDrafter(directory, published.weights, None, published)
    text, weights = load_drafter_weights(directory)
    config = DrafterConfig.from_json(text)
    check_parameters(weights, config, str(directory))
    return OpenedDrafter(directory, weights, config, None)
