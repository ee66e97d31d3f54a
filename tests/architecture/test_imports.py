"""Who may import what, beyond the contracts of import-linter: torch-free start-up, and no undeclared dependency."""

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib

import pytest

from tests.architecture.sources import PRODUCT, ROOT, SourceFile, source_files

# Torch for CUDA requires the one version that it was built for; torch for CPUs has none, and our code asks for it there
# never.
COMES_WITH_TORCH = {"triton"}
OF_A_GPU = {"flash_attn": ["flash-attn-4"]}
"""Distributions by import name that a machine without a GPU does not have."""
TORCH_FREE = (
    "control_api",
    "drafter_trainer.agent",
    "recipes",
    "slipstream.cli",
    "slipstream.entrypoint",
    "slipstream.errors",
    "slipstream.launcher",
    "slipstream.listen",
    "slipstream.run_spec",
    "slipstream.telemetry",
)

IMPORT_ALL = """
import importlib, pkgutil, sys
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    for found in pkgutil.walk_packages(getattr(module, "__path__", ()), name + "."):
        importlib.import_module(found.name)
assert name in sys.modules
heavy = {"torch", "transformers"} & set(sys.modules)
assert not heavy, f"imported: {heavy}"
"""


@pytest.mark.parametrize("package", TORCH_FREE)
def test_starts_without_torch(package: str) -> None:
    # The child looks where this process looks, in the same order: the installed package first.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    child = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, package], env=environment, capture_output=True, text=True, timeout=50
    )
    assert child.returncode == 0, child.stderr


def _declared() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    requirements = [*project["dependencies"], *extras["gguf"], *extras["data"], *extras["flash4"]]
    return {_normalised(re.split(r"[^A-Za-z0-9._-]", requirement)[0]) for requirement in requirements}


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _imported(file: SourceFile) -> set[str]:
    names = set()
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names - set(sys.stdlib_module_names) - set(PRODUCT) - COMES_WITH_TORCH


@pytest.mark.parametrize("file", source_files(*PRODUCT), ids=lambda file: file.name)
def test_third_party_imports_are_declared(file: SourceFile) -> None:
    providers = {**OF_A_GPU, **importlib.metadata.packages_distributions()}
    undeclared = {
        name for name in _imported(file) if not _declared() & {_normalised(one) for one in providers.get(name, ())}
    }
    assert not undeclared, f"{undeclared} are not dependencies in pyproject.toml"
