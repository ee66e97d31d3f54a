"""Random interleavings of everything that trainers, operators, the engine and time can do, against a simple model.

SLIPSTREAM_LEDGER_EXAMPLES=3000 and SLIPSTREAM_LEDGER_SEEDS=2000 look at more of them than CI does.
"""

import os
import random

import pytest
from hypothesis import HealthCheck, settings

from tests.unit.target_server.ledger_machine import LedgerMachine
from tests.unit.target_server.ledger_model import NUM_PACKS, RUNS

LedgerMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("SLIPSTREAM_LEDGER_EXAMPLES", "60")),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
test_any_interleaving = LedgerMachine.TestCase


RULES: dict[str, tuple[int, dict[str, list[object]]]] = {
    "lease": (8, {"packs": [1, 2, 5], "end": [None, 1, NUM_PACKS]}),
    "engine": (8, {"packs": [1, 2, 3]}),
    "confirm": (8, {"index": [0, 1, 2], "right": [True, True, True, False]}),
    "commit": (6, {}),
    "release": (1, {"index": [0, 1, 2]}),
    "confirm_void": (1, {"index": [0, 1, 2]}),
    "confirm_of_another_server": (1, {"index": [0, 1, 2]}),
    "old_incarnation": (1, {"verb": ["lease", "commit", "seek"], "older": [1, 2]}),
    "seek": (1, {"back": [0, 1, 3, 12]}),
    "wait": (2, {"seconds": [1.0, 9.0, 21.0, 31.0]}),
    "pause": (1, {"paused": [True, False, False]}),
    "idle_engine": (3, {}),
    "reject": (1, {"index": [0, 1, 2]}),
    "full_disk": (1, {"verb": ["commit", "seek", "pause"]}),
    "engine_fails": (1, {"finite": [True, True, True, False]}),
    "restart": (1, {}),
}
"""How often, and with what: mostly runs get on, so that they drift apart and leases are out when it matters."""


@pytest.mark.parametrize("seed", range(int(os.environ.get("SLIPSTREAM_LEDGER_SEEDS", "40"))))
def test_long_histories(seed: int) -> None:
    """Hundreds of events in a row."""
    rng = random.Random(seed)
    machine = LedgerMachine()
    machine.start(num_slots=rng.randint(2, 6), ahead=2 * (seed % 2))
    for run in RUNS:
        machine.join(run=run)
    names, weights = list(RULES), [weight for weight, _ in RULES.values()]
    for name in rng.choices(names, weights, k=300):
        chosen = {key: rng.choice(values) for key, values in RULES[name][1].items()}
        if name not in ("engine", "engine_fails", "wait", "idle_engine", "restart"):
            chosen["run"] = rng.choice(sorted(RUNS))
        getattr(machine, name)(**chosen)
        machine.leased_slots_keep_their_pack()
        machine.nothing_is_leaked()
        machine.the_shelf_keeps_its_bound()
    machine.teardown()
