"""The benchmark's ring between two real processes: everything that is written arrives."""

import argparse
import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks import pipeline
from benchmarks.pipeline_rows import rows_of


def test_packs_go_through_the_ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The workers import what this process does: benchmarks from the sources, the product from where it is installed.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    args = argparse.Namespace(device="cpu", out=tmp_path, pack_mib=1, seconds=0.1, rounds=1)
    answer = pipeline.measure_ring(args, tmp_path, time.monotonic() + 200.0)
    (row,) = rows_of({"what": "ring", **answer})
    assert row.ours > 0 and row.ratio is not None and row.ratio > 0, row
