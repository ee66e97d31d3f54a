"""Numbers behind flags: what is none is refused in words, not with the name of the function that reads it."""

import argparse
from collections.abc import Callable
from typing import TypeVar

Number = TypeVar("Number", int, float)


def within(kind: type[Number], least: float, most: float, of: str) -> Callable[[str], Number]:
    """For `type` of add_argument: a number from `least` to `most`.

    Args:
        kind: int or float.
        least: allowed.
        most: allowed.
        of: what it counts, as in "number of steps"; for the refusal.
    """

    def read(text: str) -> Number:
        try:
            value = kind(text)
        except ValueError:
            value = None
        # Not a number (nan) is in no range.
        if value is None or not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no {of} from {least:,.15g} to {most:,.15g}")
        return value

    return read


THREADS = within(int, 1, 4096, "number of threads")
TOKENS = within(int, 1, 1_000_000_000, "number of tokens")
