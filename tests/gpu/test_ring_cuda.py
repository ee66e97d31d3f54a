"""Packs go from this device through page-locked shared memory to another process's memory on the device, whole."""

import argparse
import time
from pathlib import Path

import pytest

from benchmarks import pipeline
from tests.fakes.processes import import_path


def test_packs_go_through_a_page_locked_ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", import_path())
    args = argparse.Namespace(device="cuda", out=tmp_path, pack_mib=16, seconds=0.5, rounds=1)
    answer = pipeline.measure_ring(args, tmp_path, time.monotonic() + 200.0)
    assert answer["page_locked"] == {"write": True, "read": True}
    assert min(answer["ring"]) > 0
