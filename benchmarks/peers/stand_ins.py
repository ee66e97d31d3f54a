"""Modules that a peer imports but its training step never runs, replaced so that the peer needs no serving stack.

Importing from a stand-in works, and so does naming what it holds in annotations and base classes; calling anything of
it is an error that says where. A module that is installed is never replaced.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from benchmarks.peers.side import SideUnavailableError

STAND_INS = {
    "speculators": {
        "openai": "asks a vLLM server for hidden states while data is generated",
        "datasets": "reads training data from disk; the benchmark hands over tensors",
        "hs_connectors": "carries hidden states from vLLM to the trainer; the benchmark hands over tensors",
        "loguru": "logging of command lines",
    },
}
"""By peer: what is replaced, and why the step does without it."""


class StandIn(ModuleType):
    """Stands for a module, or for anything in it."""

    def __getattr__(self, name: str) -> "StandIn":
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(f"{self.__name__}.{name}")

    def __mro_entries__(self, _bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()

    def __or__(self, other: Any) -> Any:
        return other

    __ror__ = __or__

    def __getitem__(self, _key: Any) -> "StandIn":
        return self

    def __call__(self, *_arguments: Any, **_options: Any) -> NoReturn:
        raise SideUnavailableError(
            f"the peer called {self.__name__}, which is a stand-in (benchmarks/peers/stand_ins.py): install it"
        )


class StandInFinder:
    """Finds stand-ins for some top-level modules and everything below them."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        """Called by the import system."""
        if name.partition(".")[0] not in self._names:
            return None
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Called by the import system."""
        return StandIn(spec.name)

    def exec_module(self, _module: ModuleType) -> None:
        """Nothing to run."""


def install_stand_ins(peer: str) -> list[str]:
    """Replace what is missing; returns the names."""
    missing = [name for name in STAND_INS[peer] if importlib.util.find_spec(name) is None]
    sys.meta_path.append(StandInFinder(missing))
    return missing
