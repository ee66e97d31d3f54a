"""What holds for every test: one thread a process, time limits by kind, and `tests` importable from anywhere."""

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parents[1]
SECONDS_BY_FOLDER = {"system": 240, "gpu": 300}

# Before torch is imported here or in a process that a test starts.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Indexes of documents, also those of processes that tests start; gone when this process ends.
_indexes = tempfile.TemporaryDirectory(prefix="slipstream-test-indexes-")
os.environ["SLIPSTREAM_INDEX_DIR"] = _indexes.name
# No test may need a hub.
os.environ["HF_HUB_OFFLINE"] = "1"

# In CI the same examples every time: a new one is searched for where somebody can look at what it finds.
hypothesis.settings.register_profile("ci", derandomize=True)
if os.environ.get("SLIPSTREAM_TEST_INSTALLED"):
    hypothesis.settings.load_profile("ci")

# A shell that starts the tests in the background has SIGINT ignored, and so would every program that they send one to.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# At the end: the product itself must come from where it is installed, so that a wheel which lacks a file fails.
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))


@pytest.fixture(autouse=True)
def _one_torch_thread() -> None:
    """Undo what an earlier test's code set; torch is not imported for it."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(autouse=True)
def _log_handlers() -> Iterator[None]:
    """A program that a test ran in this process logs to that test's stderr, which is closed afterwards."""
    root = logging.getLogger()
    kept, level = list(root.handlers), root.level
    yield
    # Handlers of pytest's own come and go with the phases of a test: only others are taken away.
    for handler in root.handlers[:]:
        if handler not in kept and not type(handler).__module__.startswith("_pytest"):
            root.removeHandler(handler)
    root.setLevel(level)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow kinds, give them their time limit, and start system tests first: they are the longest."""
    for item in items:
        folder = _folder(item)
        if folder not in SECONDS_BY_FOLDER:
            continue
        item.add_marker(folder)
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SECONDS_BY_FOLDER[folder]))
    items.sort(key=lambda item: _folder(item) != "system")


def _folder(item: pytest.Item) -> str:
    """The folder below tests/ that holds the item: unit, system, …"""
    return item.path.relative_to(ROOT / "tests").parts[0]
