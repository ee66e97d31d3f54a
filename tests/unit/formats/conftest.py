"""A tiny target and a checkpoint of a drafter for it, made once."""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from transformers import dynamic_module_utils

from drafter_trainer.drafter_config import DrafterConfig
from drafter_trainer.evaluation.command import open_checkpoint
from drafter_trainer.formats.export import ExportPlan
from tests.fakes.exports import drawn_weights, exportable_config, write_checkpoint
from tests.fakes.tiny_run import write_tiny_run


@dataclass(frozen=True)
class Source:
    """What is exported."""

    run: Path
    checkpoint: Path
    target: Path
    config: DrafterConfig
    weights: dict[str, Tensor]


def make_plan(source: Source, output: Path, name: str = "sglang", **changes: Any) -> ExportPlan:
    checkpoint, spec, _ = open_checkpoint(source.checkpoint)
    plan = ExportPlan(
        checkpoint=checkpoint,
        spec=spec,
        format_name=name,
        output=output,
        dtype="float32",
        target=spec.target,
        served_as="owner/target",
        device="cpu",
        replace=False,
        evaluation=None,
    )
    return dataclasses.replace(plan, **changes)


@pytest.fixture
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where transformers copies code that travels with weights: no place that other processes write to as well."""
    place = tmp_path / "modules"
    place.mkdir()
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(place))
    monkeypatch.syspath_prepend(str(place))
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """Read-only for all tests."""
    directory = tmp_path_factory.mktemp("source")
    recipe = write_tiny_run(directory)
    config = exportable_config()
    weights = drawn_weights(config)
    checkpoint = write_checkpoint(recipe, directory / "run", config, weights)
    return Source(directory / "run", checkpoint, directory / "target", config, weights)
