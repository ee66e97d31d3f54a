"""The command line as a process: fast, torch-free, errors in words."""

import argparse
import importlib
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from slipstream.cli.main import COMMANDS


def slipstream(*arguments: str, code: Sequence[str] = ("-m", "slipstream.cli")) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "COLUMNS": "200"}
    finished = subprocess.run(
        [sys.executable, *code, *arguments], capture_output=True, text=True, env=environment, timeout=60, check=False
    )
    assert "Traceback" not in finished.stderr
    return finished


def test_help_lists_every_command_and_is_fast() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    finished = slipstream("--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert finished.returncode == 0
    # argparse puts the help of the longest name on a line of its own.
    assert all(re.search(rf"^    {name}( |$)", finished.stdout, re.MULTILINE) for name in COMMANDS)
    # Time of the processor, so that a busy machine does not fail the test.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        (["--help"], ["torch", "pydantic", "rich", "slipstream.cli.commands.demo"]),
        (["demo", "--help"], ["torch"]),
        (["doctor", "--help"], ["torch", "pydantic"]),
        (["version"], ["torch"]),
        (["recipe", "list"], ["torch"]),
        (["run", "--help"], ["torch", "pydantic", "httpx2", "rich"]),
        (["trainer", "--help"], ["torch", "pydantic", "httpx2", "rich"]),
        (["recipe", "show", "demo-smollm2-135m"], ["torch", "transformers", "numpy"]),
    ],
)
def test_commands_import_only_what_they_need(arguments: list[str], absent: list[str]) -> None:
    script = (
        "import sys\nfrom slipstream.cli.main import main\nstatus = main()\n"
        f"loaded = [name for name in {absent!r} if name in sys.modules]\n"
        "sys.exit(f'loaded: {loaded}' if loaded else status)"
    )
    finished = slipstream(*arguments, code=("-c", script))
    assert (finished.returncode, finished.stderr) == (0, "")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_its_module(name: str) -> None:
    module = importlib.import_module(f"slipstream.cli.commands.{name}")
    subparsers = argparse.ArgumentParser().add_subparsers()
    module.add_parser(subparsers)
    assert list(subparsers.choices) == [name]
    assert callable(module.run)


def test_usage_errors_give_2() -> None:
    for arguments in (["docter"], ["doctor", "-o", "xml"]):
        finished = slipstream(*arguments)
        assert finished.returncode == 2
        assert "usage: slipstream" in finished.stderr


def test_recipe_show_gives_values_with_origins() -> None:
    finished = slipstream("recipe", "show", "demo-smollm2-135m", "--set", "train.seed=7", "--set", "train.seed=8")
    assert finished.returncode == 0
    lines = [line.split() for line in finished.stdout.splitlines()]
    assert ["seed", "=", "8", "#", "override"] in lines
    assert ["keep", "=", "2", "#"] in [line[:4] for line in lines]


def test_a_recipe_alone_is_shown() -> None:
    shown = slipstream("recipe", "show", "demo-smollm2-135m", "-o", "json")
    assert slipstream("recipe", "demo-smollm2-135m", "-o", "json").stdout == shown.stdout
    assert "no recipe at nowhere/my.toml" in slipstream("recipe", "nowhere/my.toml").stderr
    assert "usage: slipstream recipe" in slipstream("recipe", "--help").stdout


def test_recipe_show_as_json(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('name = "mine"\ntarget.model = "m"\ndata.files = ["a"]\ntrain.epochs = 1\n')
    shown = json.loads(slipstream("recipe", "show", str(recipe), "-o", "json").stdout)
    assert shown["spec"]["data"]["files"] == [str(tmp_path / "a")]
    assert shown["origins"]["train.epochs"] == "mine.toml:4"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["recipe", "show", "demo-smolm2-135m"], "Did you mean 'demo-smollm2-135m'?"),
        (["recipe", "show", "./nowhere.toml"], "error: no recipe at nowhere.toml."),
        (["recipe", "show", "demo-smollm2-135m", "--set", "train.max_stepz=1"], "did you mean train.max_steps?"),
    ],
)
def test_refusals_are_words(arguments: list[str], words: str) -> None:
    finished = slipstream(*arguments)
    assert finished.returncode == 2
    assert finished.stderr.startswith("error: ")
    assert words in finished.stderr
