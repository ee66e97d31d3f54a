"""Generated code behind the tripwire, in processes of their own: the self-test that a trainer runs at start, and four
threads at once, which made the design that this replaces run dense."""

import json
import os
import subprocess
import sys

from tests.fakes.thread_load import TRACES_ARE_SEEN

SELF_TEST = """
import torch
from drafter_trainer import flex_policy

device = torch.device("cpu")
print(flex_policy.check_environment(device).in_words())
flex_policy.configure_compiler()
flex_policy.install_tripwire()
flex_policy.self_test(device)
print("passed")
"""


def test_compiled_attention_runs_behind_the_tripwire() -> None:
    """On CPU this generates and compiles C++; forward only, since torch has no flex backward there."""
    run = subprocess.run([sys.executable, "-c", SELF_TEST], capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.endswith("passed\n")


def test_four_threads_are_right_or_refused_and_never_dense() -> None:
    """Another thread's trace is kept open, so that every call meets it, whichever torch this is."""
    modes = ("held", "lenient", "owned", "race")
    run = subprocess.run(
        [sys.executable, "-m", "tests.fakes.thread_load", "cpu", *modes],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    results = dict(zip(modes, map(json.loads, run.stdout.splitlines()), strict=True))
    assert all(result["before"] == {"right": 1} for mode, result in results.items() if mode != "race"), results
    assert all(result["after"] == {"right": 25} for result in results.values()), results
    if TRACES_ARE_SEEN:
        assert results["held"]["during"] == {"RuntimeError": 100}, "torch refuses"
        # Told not to, torch runs the function uncompiled: the tripwire refuses where it would have gone dense.
        assert results["lenient"]["during"].keys() <= {"dense", "right"} and results["lenient"]["during"]["dense"] > 0
    else:
        assert results["held"]["during"] == results["lenient"]["during"] == {"right": 100}
    assert results["owned"]["during"] == {"AssertionError": 100}, "the function of another thread"
    assert results["race"]["during"].keys().isdisjoint({"dense", "wrong"}), results
