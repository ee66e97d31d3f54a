"""Every variant is a run that the base recipe can become, differs from it, and is compared with it prompt by prompt."""

from typing import Any

import pytest

from benchmarks.ablation_rows import make_rows, markdown
from benchmarks.ablation_variants import BASE, BASE_SEEDS, BY_NAME, FP8_SEEDS, VARIANTS, Variant
from benchmarks.ablations import LAST_ONLY
from benchmarks.quality import ENDLESS, OUR_TRIES
from recipes import recipe_path
from slipstream.run_spec.load import load_recipe
from slipstream.run_spec.spec import RunSpec

RECIPE = recipe_path("smollm2-135m-1gpu")


def _spec(*settings: str) -> RunSpec:
    return load_recipe(RECIPE, [*LAST_ONLY, "train.max_tokens=", "train.max_steps=9", *settings]).spec


@pytest.mark.parametrize("variant", VARIANTS[1:], ids=lambda variant: variant.name)
def test_a_variant_is_a_valid_run_that_differs_from_the_base(variant: Variant) -> None:
    assert _spec(*variant.settings) != _spec() or variant.data_share < 1.0
    if variant.steps_of is not None:
        model = BY_NAME[variant.steps_of]
        assert model.steps_of is None, "its steps are those of a run by the clock"
        # What decides the cost of a step is the same, but for FP8, which is compared for what is learned.
        changed, base = _spec(*variant.settings), _spec(*model.settings)
        assert (changed.drafter, changed.data) == (base.drafter, base.data)
        assert changed.train.model_copy(update={"seed": 0, "fp8": False}) == base.train
        assert (changed.loss.objective, changed.optimizer.kind) == (base.loss.objective, base.optimizer.kind)


def test_settings_of_the_comparison_are_valid() -> None:
    assert all(load_recipe(RECIPE, ["train.max_tokens=", *ENDLESS, *settings]) for settings in OUR_TRIES)


def test_names_are_unique_and_the_base_comes_first() -> None:
    assert len(BY_NAME) == len(VARIANTS) and VARIANTS[0].name == BASE


def found(tokens: list[int], speed: float = 1.0, at_once: int = 1) -> dict[str, Any]:
    """A finished variant: tokens of two prompts, in ten rounds each."""
    evaluation = {"tokens": {"s": tokens}, "rounds": {"s": [10, 10]}}
    facts = {"asked": {"ingredient": "x"}, "steps": 5, "at_once": at_once}
    return facts | {"tokens_per_second": speed, "evaluation": evaluation}


def test_rows_compare_with_the_base() -> None:
    variants = {BASE: found([20, 30], 10.0, 1), "muon": found([30, 45], 5.0, 1), "lr 2e-3": found([20, 20], 3.0, 4)}
    rows = make_rows(variants)
    assert [(row.case, row.ratio) for row in rows if "accepted" in row.metric] == [
        (BASE, 1.0),
        ("muon", 1.5),
        ("lr 2e-3", 0.8),
    ]
    assert rows[2].interval == pytest.approx((1.5, 1.5))
    # Several at once on one GPU have no speed of their own.
    assert [(row.case, row.ratio) for row in rows if "tokens/s" in row.metric] == [(BASE, 1.0), ("muon", 0.5)]
    assert "not measured yet" in markdown({"muon": variants["muon"]})


def test_fp8_is_judged_by_what_seeds_differ() -> None:
    """Bfloat16's seeds: 2.4, 2.5 and 2.6, so that 0.2 less is allowed."""
    seeds = {name: found([20, tokens]) for name, tokens in zip(BASE_SEEDS, (28, 30, 32), strict=True)}

    def row(*tokens: int) -> Any:
        return make_rows(seeds | {name: found([20, n]) for name, n in zip(FP8_SEEDS, tokens, strict=True)})[-1]

    assert set(BASE_SEEDS) | set(FP8_SEEDS) <= set(BY_NAME)
    assert (row(28, 29, 30).ratio, row(25, 25, 25).ratio) == (pytest.approx(0.2 / 0.05), pytest.approx(0.2 / 0.25))
    assert (row(30, 30, 30).ratio, row(30, 30, 30).floor) == (100.0, 1.0)
    assert not any("fp8" in row.case for row in make_rows(seeds))
