"""Generated code behind the tripwire, in a process of its own: the self-test that a trainer runs at start."""

import subprocess
import sys

SELF_TEST = """
import torch
from drafter_trainer import flex_policy

device = torch.device("cpu")
print(flex_policy.check_environment(device).in_words())
flex_policy.configure_compiler(declared_graphs=1)
flex_policy.install_tripwire()
flex_policy.self_test(device)
print("passed")
"""


def test_compiled_attention_runs_behind_the_tripwire() -> None:
    """On CPU this generates and compiles C++; forward only, since torch has no flex backward there."""
    run = subprocess.run([sys.executable, "-c", SELF_TEST], capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.endswith("passed\n")
