"""The plug-in that docs/drafters.md shows, installed as a package manager would: module and metadata on the path."""

import importlib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "drafters.md"
NAME = "last_feature"


def write_plug_in(directory: Path, *, name: str = NAME, value: str | None = None, code: str | None = None) -> Path:
    """A directory that makes the architecture installed for whoever has it on its path.

    Args:
        directory: made.
        name: of the entry point.
        value: what it names; default: the document's class.
        code: of the module last_feature; default: the document's.
    """
    metadata = directory / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        f"[slipstream.drafters]\n{name} = {value or f'{NAME}:LastFeatureConfig'}\n"
    )
    (directory / f"{NAME}.py").write_text(document_code() if code is None else code)
    return directory


def document_code() -> str:
    """The one block of Python in the document."""
    (code,) = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return code


@contextmanager
def installed(directory: Path) -> Iterator[None]:
    """For this process, while the context lasts."""
    sys.path.insert(0, str(directory))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(directory))
        sys.modules.pop(NAME, None)
        importlib.invalidate_caches()
