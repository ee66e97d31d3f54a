"""The parser of every program: a mistyped word is refused by the command it was typed behind, with the nearest one.

Plain argparse lets the whole program refuse a flag that one of its commands does not know, with the program's usage.
"""

import argparse
import difflib
from typing import Any


class CommandParser(argparse.ArgumentParser):
    """An ArgumentParser whose commands, which argparse makes of the same class, know what was probably meant."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse what is unknown here already: `parse_args` of the whole program would be the next to look."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flag = next((word for word in unknown if word.startswith("-")), "").partition("=")[0]
            self.error(f"unrecognized arguments: {' '.join(unknown)}{_hint(flag, self._option_string_actions)}")
        return parsed, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as refused:
            refused.message += _hint(str(value), action.choices or ())
            raise


def _hint(word: str, known: Any) -> str:
    near = difflib.get_close_matches(word, [str(one) for one in known], n=1)
    return f"; did you mean {near[0]}?" if near else ""
