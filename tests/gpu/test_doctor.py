"""`slipstream doctor` on a machine with a GPU: the trainer's own checks ran there, in a process of their own."""

import json
import os
import subprocess
import sys

from tests.fakes.processes import import_path


def test_the_policy_is_shown_on_the_first_gpu() -> None:
    child = subprocess.run(
        [sys.executable, "-m", "slipstream.cli", "doctor", "--output", "json"],
        env=os.environ | {"PYTHONPATH": import_path()},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    told = json.loads(child.stdout)
    policy = told["machine"]["policy"]
    assert policy["problem"] is None and len(policy["passed"]) == 3, policy
    assert told["abilities"]["GPU 0"][-3:] == policy["passed"]
