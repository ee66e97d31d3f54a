"""The image without torch has everything that control API and command line import: tried without the rest."""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.architecture.sources import ROOT, source_files

IMPORT_ALL = """
import importlib, sys
hidden = set({hidden!r})

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hide())
for name in {modules!r}:
    importlib.import_module(name)
"""


def slim_requirements() -> list[str]:
    command = [sys.executable, str(ROOT / "deploy/requirements.py")]
    return subprocess.check_output(command, text=True, cwd=ROOT).splitlines()


def closure(requirements: list[str]) -> set[str]:
    """The normalised names of the distributions that installing the requirements brings here."""
    found: set[str] = set()
    todo = [Requirement(each) for each in requirements]
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        try:
            todo += [Requirement(each) for each in distribution(name).requires or ()]
        except PackageNotFoundError:
            found.discard(name)
    return found


def test_control_api_and_command_line_import_nothing_else() -> None:
    present = closure(slim_requirements())
    assert "torch" not in present and "fastapi" in present
    hidden = {
        module
        for module, owners in packages_distributions().items()
        if not {canonicalize_name(owner) for owner in owners} & (present | {"slipstream"})
    }
    assert {"torch", "transformers", "numpy"} <= hidden
    files = source_files("control_api", "slipstream/cli", "recipes")
    names = [file.name.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for file in files]
    modules = [name for name in names if not name.endswith("__main__")]
    assert "control_api.app" in modules and "slipstream.cli.commands.doctor" in modules
    program = IMPORT_ALL.format(hidden=sorted(hidden), modules=[*modules, "uvicorn", "slipstream.control_client"])
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_is_left_out_is_a_dependency() -> None:
    """A name that pyproject.toml no longer has would hide nothing, and stay for ever."""
    import runpy

    script = runpy.run_path(str(ROOT / "deploy/requirements.py"))
    everything = script["requirements"](ROOT / "pyproject.toml", with_torch=True)
    assert {script["distribution"](each) for each in everything} >= script["NEEDED_WITH_TORCH"]
    assert script["distribution"]("SQLAlchemy[x]>=2.0") == "sqlalchemy"
