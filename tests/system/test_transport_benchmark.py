"""The benchmark of the wire runs as a whole, against a real server."""

import argparse
import os
import sys
from pathlib import Path

import pytest

from benchmarks import transport


def test_bytes_and_round_trips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "CASES", ((2, 0.0),))
    # The workers import what this process does: benchmarks from the sources, the product from where it is installed.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    directory = tmp_path / "work"
    directory.mkdir()
    args = argparse.Namespace(out=tmp_path, leave_by=200.0, probe_bytes="1MiB", seconds=0.1, parts=["bytes", "trips"])
    answers = transport.measure(args, directory)
    assert not [answer["failed"] for answer in answers if "failed" in answer]
    rows = [row for answer in answers for row in transport.rows_of(answer)]
    assert len(rows) == 4 and all(row.ratio is not None and row.ratio > 0 for row in rows), rows
