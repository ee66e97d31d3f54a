"""CI tests the wheel: what is imported is what `pip install` laid down, and nothing is missing from it."""

import importlib
import os
import sysconfig
from pathlib import Path

import pytest

from tests.architecture.sources import PRODUCT, ROOT

pytestmark = pytest.mark.skipif(
    os.environ.get("SLIPSTREAM_TEST_INSTALLED") != "1",
    reason="the package is imported from the checkout; .ci/run installs the wheel and sets SLIPSTREAM_TEST_INSTALLED=1",
)
SITE_PACKAGES = Path(sysconfig.get_path("purelib")).resolve()


@pytest.mark.parametrize("package", PRODUCT)
def test_imported_from_site_packages(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__file__ is not None
    assert Path(module.__file__).resolve().parent == SITE_PACKAGES / package


@pytest.mark.parametrize("package", PRODUCT)
def test_every_file_is_in_the_wheel(package: str) -> None:
    files = [path.relative_to(ROOT) for path in (ROOT / package).rglob("*") if path.is_file()]
    suffixes = {".py", ".toml", ".txt", ".jsonl", ".gz", ".html", ".js", ".css", ".svg"}
    wanted = [path for path in files if "__pycache__" not in path.parts and path.suffix in suffixes]
    assert not [str(path) for path in wanted if not (SITE_PACKAGES / path).is_file()]
