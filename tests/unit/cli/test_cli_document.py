"""docs/cli.md says what is: every command, every exit status."""

import re

from slipstream.cli import exit_status
from slipstream.cli.commands import run, target, trainer
from slipstream.errors import _EXIT_CODES
from tests.architecture.sources import ROOT

DOCUMENT = (ROOT / "docs/cli.md").read_text(encoding="utf-8")


def test_every_exit_status_is_in_the_table() -> None:
    table = [int(status) for status in re.findall(r"^\| (\d+) \|", DOCUMENT, re.MULTILINE)]
    own = {value for name, value in vars(exit_status).items() if name.isupper()}
    assert table == sorted({*_EXIT_CODES.values(), *own, 0, 1, 141})


def test_statuses_of_the_command_line_are_its_own() -> None:
    own = [value for name, value in vars(exit_status).items() if name.isupper()]
    assert len(own) == len(set(own))
    assert not set(own) & {1, 2, *_EXIT_CODES.values()}


def test_every_action_has_an_example() -> None:
    examples = set(re.findall(r"`slipstream (\w+ \w+)", DOCUMENT))
    assert {f"run {action}" for action in run.HANDLERS} <= examples
    others = {"trainer": trainer.HANDLERS, "target": target.HANDLERS, "checkpoint": ("ls", "export")}
    assert {f"{command} {action}" for command, actions in others.items() for action in actions} <= examples
