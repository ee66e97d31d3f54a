"""A cache of hidden states whose writers are killed, and one on a disk that is full: what is served is right."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.processes import Processes


@pytest.fixture
def processes() -> Iterator[Processes]:
    started = Processes()
    yield started
    started.close()


def test_what_killed_writers_leave_is_whole(processes: Processes, tmp_path: Path) -> None:
    arguments = ("kills", tmp_path / "cache", "--seed", "1", "--kills", "20")
    writers = processes.start("tests.fakes.mortal_cache", *arguments)
    assert writers.wait_exit(timeout=60) == 0, writers.output
    found = re.search(r"killed 20 times, found \[(.*)\]", writers.output)
    assert found is not None, writers.output
    assert int(found.group(1).rpartition(",")[2]) > 20
    assert "state_cache_corrupt" not in writers.output


def test_on_a_full_disk_the_cache_stops_with_one_warning(processes: Processes, tmp_path: Path) -> None:
    writer = processes.start("tests.fakes.mortal_cache", "full", tmp_path / "cache")
    assert writer.wait_exit(timeout=60) == 0, writer.output
    assert writer.output.count("state_cache_stopped") == 1
    assert "remedy=" in writer.output
