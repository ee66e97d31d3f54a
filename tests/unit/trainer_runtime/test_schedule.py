"""Learning rates: exact at every border, and the same whenever they are asked for."""

import pytest

from drafter_trainer.schedule import learning_rate
from slipstream.run_spec.spec import OptimizerSpec


def spec_of(**settings: object) -> OptimizerSpec:
    return OptimizerSpec.model_validate(
        {"learning_rate": 1.0, "warmup_fraction": 0.1, "final_fraction": 0.2} | settings
    )


def test_the_learning_rate_rises_then_falls_to_its_share() -> None:
    spec = spec_of()
    rates = [learning_rate(spec, step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert rates[10] == 1.0 and rates == rates[:11] + sorted(rates[11:], reverse=True)
    assert rates[55] == pytest.approx(0.6)
    assert learning_rate(spec, 100, 100) == pytest.approx(0.2)
    assert learning_rate(OptimizerSpec(learning_rate=1.0, warmup_fraction=0.0), 0, 1) == 1.0


# (settings, {step of 100: rate}); the final rate belongs to step 100, one past the last.
BORDERS = [
    ({"schedule": "cosine"}, {0: 0.1, 9: 1.0, 10: 1.0, 55: 0.6, 100: 0.2}),
    ({"schedule": "linear"}, {0: 0.1, 9: 1.0, 10: 1.0, 55: 0.6, 99: 0.2 + 0.8 / 90, 100: 0.2}),
    ({"schedule": "linear", "warmup_fraction": 0.0}, {0: 1.0, 50: 0.6, 100: 0.2}),
    ({"schedule": "wsd"}, {0: 0.1, 9: 1.0, 10: 1.0, 79: 1.0, 80: 1.0, 81: 0.96, 90: 0.6, 99: 0.24, 100: 0.2}),
    ({"schedule": "wsd", "decay_fraction": 0.5}, {49: 1.0, 50: 1.0, 51: 0.984, 75: 0.6, 100: 0.2}),
    ({"schedule": "wsd", "decay_fraction": 0.0}, {10: 1.0, 99: 1.0}),
    # A decay that reaches into the warm-up begins where that ends.
    ({"schedule": "wsd", "decay_fraction": 0.95}, {8: 0.9, 9: 1.0, 10: 1.0, 55: 0.6, 100: 0.2}),
]


@pytest.mark.parametrize(("settings", "rates"), BORDERS, ids=lambda value: str(value)[:60])
def test_borders(settings: dict[str, object], rates: dict[int, float]) -> None:
    spec = spec_of(**settings)
    assert {step: learning_rate(spec, step, 100) for step in rates} == pytest.approx(rates, rel=1e-12)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("total_steps", [1, 2, 3, 7])
def test_short_runs_have_rates_too(schedule: str, total_steps: int) -> None:
    rates = [learning_rate(spec_of(schedule=schedule), step, total_steps) for step in range(total_steps)]
    assert rates[0] > 0.2 and all(0.2 <= rate <= 1.0 for rate in rates)
