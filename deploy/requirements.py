"""Print what an image installs, one requirement a line, read from pyproject.toml: the package itself goes in after it.

    python deploy/requirements.py                # what torch is not needed for: control API and command line
    python deploy/requirements.py --with-torch   # everything, GGUF targets too

Only the standard library: it runs before anything is installed.
"""

import argparse
import re
import tomllib
from pathlib import Path

NEEDED_WITH_TORCH = frozenset(
    {
        "google-crc32c",
        "grpcio-reflection",
        "huggingface-hub",
        "jinja2",
        "numpy",
        "safetensors",
        "torch",
        "transformers",
    }
)
"""What only target server and trainer import. A new dependency is in both images until it is named here."""


def requirements(pyproject: Path, *, with_torch: bool) -> list[str]:
    """The requirements of one image."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    if with_torch:
        return [*project["dependencies"], *project["optional-dependencies"]["gguf"]]
    return [each for each in project["dependencies"] if distribution(each) not in NEEDED_WITH_TORCH]


def distribution(requirement: str) -> str:
    """The normalised name in `name[extra]>=1; marker`."""
    name = re.match(r"[\w.-]+", requirement)
    assert name is not None, requirement
    return re.sub(r"[-_.]+", "-", name.group()).lower()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--with-torch", action="store_true")
    options = parser.parse_args()
    print("\n".join(requirements(Path("pyproject.toml"), with_torch=options.with_torch)))
