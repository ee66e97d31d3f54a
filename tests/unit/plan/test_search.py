"""The nearest settings that fit: they fit, nothing nearer does, and the recipe takes them."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.plan.memory import GIB, plan_memory
from slipstream.plan.search import _knobs, _peak, nearest_fit, single_fits
from slipstream.plan.sizes import RunSizes, TargetSizes
from slipstream.run_spec.load import load_recipe
from tests.unit.plan.sizes import SIZES, A, C

RECIPE = """
name = "searched"
[target]
model = "Qwen/Qwen3-8B"
[data]
files = ["a.jsonl"]
pack_tokens = 4096
[drafter]
num_layers = 5
[train]
device = "cuda"
max_steps = 10
"""
TARGET = TargetSizes(36, 4096, 12288, 32, 8, 128, 151_936, False)


def test_what_fits_is_left_as_it_is() -> None:
    fit = nearest_fit(A, 80 * GIB, 80 * GIB)
    assert fit is not None and fit.settings == () and fit.price == 0.0
    assert fit.peak_bytes == plan_memory(A, 80 * GIB).peak_bytes


@pytest.mark.parametrize(("size", "memory"), [("A", 12), ("A", 16), ("A", 20), ("B", 24), ("B", 48), ("C", 2)])
def test_the_nearest_fits_and_was_dearer_to_find_than_any_cheaper(size: str, memory: int) -> None:
    sizes, limit = SIZES[size], memory * GIB
    fit = nearest_fit(sizes, limit, limit)
    assert fit is not None and 0 < fit.peak_bytes <= limit and fit.price > 0
    for alone in single_fits(sizes, limit, limit):
        assert alone.price >= fit.price and alone.peak_bytes <= limit


def test_of_very_many_combinations_none_is_taken_that_is_dearer_than_one_setting() -> None:
    fit = nearest_fit(replace(C, packs_per_step=99_999_999_999), 24 * GIB, 24 * GIB)
    alone = single_fits(replace(C, packs_per_step=99_999_999_999), 24 * GIB, 24 * GIB)
    assert fit is not None and alone and fit.price <= alone[0].price


def test_no_cheaper_combination_fits() -> None:
    """Against every combination of the grid."""
    sizes, limit = replace(C, anchors_per_pack=256, packs_per_step=2), GIB * 3 // 2
    fit = nearest_fit(sizes, limit, limit)
    assert fit is not None
    knobs = [list(knob) for knob in _knobs(sizes, limit)]
    fitting = (
        sum(change.price for change in changes)
        for changes in itertools.product(*knobs)
        if sum(change.price for change in changes) < fit.price - 1e-6 and _peak(sizes, changes, limit) <= limit
    )
    assert next(fitting, None) is None


def test_what_cannot_fit_is_none() -> None:
    assert nearest_fit(A, 4 * GIB, 4 * GIB) is None
    assert single_fits(A, 4 * GIB, 4 * GIB) == []


@pytest.mark.parametrize("extra", [[], ["optimizer.ema_decay=0.99", "train.packs_per_step=8"], ["loss.objective=kl"]])
@pytest.mark.parametrize("memory", [12, 16, 24])
def test_the_recipe_takes_the_settings_and_then_fits(extra: list[str], memory: int, tmp_path: Path) -> None:
    recipe = tmp_path / "searched.toml"
    recipe.write_text(RECIPE)
    sizes = RunSizes.of(load_recipe(recipe, extra).spec, TARGET)
    fit = nearest_fit(sizes, memory * GIB, memory * GIB)
    assert fit is not None
    changed = RunSizes.of(load_recipe(recipe, [*extra, *fit.settings]).spec, TARGET)
    assert plan_memory(changed, memory * GIB).peak_bytes == fit.peak_bytes <= memory * GIB


FIXED: dict[str, tuple[dict[str, Any], str]] = {
    "layers": ({"layers_are_named": True}, "drafter.num_layers"),
    "pack": ({"least_pack_tokens": 4096}, "data.pack_tokens"),
    "optimizer": ({"optimizer": "muon"}, "optimizer.kind"),
}


@pytest.mark.parametrize("what", FIXED)
def test_what_the_recipe_does_not_allow_is_not_proposed(what: str) -> None:
    changes, setting = FIXED[what]
    offered = [text for knob in _knobs(replace(A, **changes), 24 * GIB) for change in knob for text in change.settings]
    assert offered and not any(text.startswith(setting) for text in offered)
