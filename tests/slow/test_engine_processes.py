"""Hidden states of engine processes equal transformers' own for each document alone: one, two, and one of two ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FAMILIES = ("llama", "qwen3", "gemma2", "gemma3", "mistral", "qwen3_moe")


@pytest.mark.timeout(300)
def test_every_family_with_one_engine_with_two_and_on_two_ranks(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.fakes.forked_engines", str(tmp_path), *FAMILIES]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert ran.returncode == 0, ran.stderr
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    assert tuple(each["family"] for each in found) == FAMILIES
    for each in found:
        assert each["one"] < 1e-5 and each["split"] < 1e-5, each
        assert each["two_are_equal"] and each["facts_are_equal"] and each["weights_are_equal"], each
        assert "embed_tokens.weight" in each["weights"], each
