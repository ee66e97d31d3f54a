"""Real processes and what they work on."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.processes import Processes
from tests.fakes.tiny_run import write_tiny_run


@pytest.fixture
def processes() -> Iterator[Processes]:
    """Starts processes for one test; kills what it left running."""
    started = Processes()
    yield started
    started.close()


@pytest.fixture(scope="session")
def tiny_recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe with its target and conversations beside it; read-only for all tests."""
    return write_tiny_run(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def target_address(tiny_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A target server that the tests of a module share; every test names its own runs."""
    started = Processes()
    ledger = tmp_path_factory.mktemp("ledger") / "ledger.sqlite"
    # Runs of one stream wait for each other while they count as present; those of earlier tests have gone.
    flags = ("--ledger", ledger, "--probe-bytes", "1MiB", "--subscription-timeout", "1")
    _, address = started.start_target_server(tiny_recipe, *flags)
    yield address
    started.close()
