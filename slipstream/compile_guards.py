"""What torch versions do when a compiled flex_attention call could go dense, as data. Torch-free.

Facts read in the torch 2.9 to 2.15 wheels. The trainer's own tripwire covers what a version leaves open.
"""

import re
from collections.abc import Mapping

MINIMUM_TORCH = (2, 11)

DISABLING_VARIABLES = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_SUPPRESS_ERRORS")
"""Set to anything but 0 or nothing, each lets a compiled call run dense; the trainer refuses to start."""

_COMPILE_OFF = "compilation that is switched off"
_OTHER_THREAD = "a trace in another thread"
_LIMITS = "graph limits"

_GUARDS: tuple[tuple[tuple[int, int], Mapping[str, str]], ...] = (
    (
        (2, 11),
        {
            _OTHER_THREAD: "raises RuntimeError (dense with error_on_nested_fx_trace=False)",
            _COMPILE_OFF: "dense, in silence",
            _LIMITS: "one Dynamo limit for all functions",
        },
    ),
    ((2, 12), {_COMPILE_OFF: "dense, with a warning", _LIMITS: "a limit per function (recompile_limit)"}),
    (
        (2, 13),
        {
            _OTHER_THREAD: "raises RuntimeError, but for those of a compilation (masked)",
            _COMPILE_OFF: "raises RuntimeError",
            _LIMITS: "a limit per function, own cache (isolate_recompiles)",
        },
    ),
    ((2, 14), {_OTHER_THREAD: "no longer seen (state is per thread)"}),
)


def torch_release(version: str) -> tuple[int, int] | None:
    """(major, minor) of a torch version such as `2.13.0+cu128`; None when it has another form."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None


def guards_of(release: tuple[int, int]) -> dict[str, str]:
    """What could make a compiled call dense → what this torch does then; empty below the minimum."""
    guards: dict[str, str] = {}
    for since, changes in _GUARDS:
        if since <= release:
            guards |= changes
    return guards


def disabling_variables(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Variables that are set in a way that would let compiled attention run dense, as NAME=value."""
    return tuple(
        f"{name}={environment[name]}" for name in DISABLING_VARIABLES if environment.get(name, "0") not in ("", "0")
    )
