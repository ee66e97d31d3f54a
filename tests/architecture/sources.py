"""The repository's own Python files, parsed once."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("slipstream", "target_server", "drafter_trainer", "control_api", "recipes")
AROUND = ("tests", "tools", "benchmarks", "deploy")
GENERATED = "slipstream/hidden_states/"

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class SourceFile:
    """One Python file; `name` is its path from the repository root."""

    name: str

    @cached_property
    def text(self) -> str:
        return (ROOT / self.name).read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.name)

    @property
    def num_lines(self) -> int:
        return len(self.text.splitlines())

    def functions(self) -> Iterator[Function]:
        """Every function and method, nested ones too."""
        return (node for node in ast.walk(self.tree) if isinstance(node, Function))


def source_files(*folders: str) -> list[SourceFile]:
    """Python files below `folders`, generated code left out."""
    paths = (path.relative_to(ROOT).as_posix() for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return [SourceFile(path) for path in sorted(paths) if not path.startswith(GENERATED)]
