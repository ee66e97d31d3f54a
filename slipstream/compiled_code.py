"""What torch compiles, function by function. Torch keeps its graphs and limits by code object, so each gets its own."""

import types
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch._dynamo.utils

P = ParamSpec("P")
R = TypeVar("R")


def with_own_code(function: Callable[P, R], name: str) -> Callable[P, R]:
    """The same function with a code object of its own, so that it shares no graph and no limit with any other.

    Args:
        function: written in Python.
        name: of the code object, behind `slipstream_`, as it appears in torch's logs.
    """
    assert isinstance(function, types.FunctionType), f"{function} is not written in Python"
    code = function.__code__.replace(co_name=f"slipstream_{name}")
    own = types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    return cast(Callable[P, R], own)


def compiled_graphs() -> int:
    """Graphs that Dynamo has compiled in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
