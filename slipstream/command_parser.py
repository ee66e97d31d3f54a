"""The parser of every program: a mistyped word is refused by the command it was typed behind, with the nearest one.

Plain argparse lets the whole program refuse a flag that one of its commands does not know, with the program's usage.
"""

import argparse
import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

# What other programs call it.
_SAME: Mapping[str, Sequence[str]] = {
    "add": ("create", "start"),
    "cancel": ("stop",),
    "cat": ("get", "show"),
    "delete": ("remove",),
    "describe": ("get", "show"),
    "follow": ("watch",),
    "forget": ("delete", "remove"),
    "info": ("get", "show"),
    "inspect": ("get", "show"),
    "kill": ("stop",),
    "list": ("ls",),
    "log": ("logs",),
    "new": ("create",),
    "remove": ("delete",),
    "rm": ("delete", "remove"),
    "show": ("get", "ls"),
    "start": ("create", "resume", "up"),
    "status": ("get", "ls"),
    "submit": ("create",),
    "tail": ("logs",),
    "train": ("create", "run"),
}


class CommandParser(argparse.ArgumentParser):
    """An ArgumentParser whose commands, which argparse makes of the same class, know what was probably meant."""

    elsewhere: Mapping[str, str] = {}
    """Words that are no command here, and the command, as it is typed, that does it."""
    _typed: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse what is unknown here already: `parse_args` of the whole program would be the next to look."""
        self._typed = tuple(args or ())
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flag = next((word for word in unknown if word.startswith("-")), "").partition("=")[0]
            self.error(f"unrecognized arguments: {' '.join(unknown)}{_hint(_near(flag, self._option_string_actions))}")
        return parsed, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as refused:
            known = [str(one) for one in action.choices or ()]
            is_command = isinstance(action, argparse._SubParsersAction)
            meant = self._command_meant(str(value), known) if is_command else _near(str(value), known)
            refused.message += _hint(meant)
            raise

    def _command_meant(self, word: str, known: Collection[str]) -> list[str]:
        if word in self.elsewhere:
            return [f"{self.prog} {self.elsewhere[word]}"]
        behind = self._typed[self._typed.index(word) + 1 :] if word in self._typed else ()
        if (first := next((one for one in behind if one in known), None)) is not None:
            return [f"{self.prog} {first} {word}"]
        return [one for one in _SAME.get(word, ()) if one in known] or _near(word, known)

    def error(self, message: str) -> Any:
        """As argparse does; where the command is missing, with what there is."""
        commands = next((one for one in self._actions if isinstance(one, argparse._SubParsersAction)), None)
        if commands is not None and message.endswith(f": {commands.metavar}"):
            message += f", one of {', '.join(commands.choices)}"
        super().error(message)


def _near(word: str, known: Collection[str]) -> list[str]:
    return difflib.get_close_matches(word, [str(one) for one in known], n=1)


def _hint(meant: Sequence[str]) -> str:
    return f"; did you mean {' or '.join(meant)}?" if meant else ""
