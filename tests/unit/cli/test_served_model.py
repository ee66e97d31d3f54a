"""`run create` beside a local stack: the run names the model as the stack's target has it."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.launcher.home import Home, SupervisorState, try_lock
from tests.unit.cli.conftest import Command, Desk, Served

RECIPE = "demo-smollm2-135m"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "served.gguf"
    path.touch()
    return path


@pytest.fixture
def stack(desk: Desk, served: Served, home: Path, model: Path) -> Iterator[Path]:
    """A stack that is up, of the desk's API and one target."""
    desk.target()
    Home(home).make()
    state = SupervisorState(
        pid=os.getpid(),
        state="READY",
        api=served.address,
        dashboard="",
        token_file=None,
        target=None,
        processes=(),
    )
    Home(home).supervisor_file.write_text(state.model_dump_json())
    target = {"name": "local", "listen": "127.0.0.1:0", "address": "127.0.0.1:2", "device": "cpu"}
    parts = {"api": {"listen": "127.0.0.1:0", "address": "127.0.0.1:1"}, "trainers": [], "data_roots": []}
    Home(home).stack_file.write_text(
        json.dumps({"version": 1, "target": target | {"model": {"model": str(model)}}, **parts})
    )
    # flock belongs to the open file: another one of this process is refused as that of another process would be.
    lock = try_lock(Home(home).supervisor_lock)
    assert lock is not None
    with lock:
        yield home


def test_a_run_names_what_the_stack_serves(slipstream: Command, desk: Desk, stack: Path, model: Path) -> None:
    answer = slipstream("run", "create", RECIPE)
    assert answer.status == 0
    assert f"the run's target.model is what this stack serves: {model}" in answer.err
    target = desk.get(f"runs/{RECIPE}")["spec"]["target"]
    assert (target["model"], target["revision"]) == (str(model), None)
    # The recipe says float32, and would be believed by whoever makes held-out answers for it.
    assert ", its target.dtype bfloat16 (not float32)\n" in answer.err and target["dtype"] == "bfloat16"


def test_what_was_said_stays(slipstream: Command, desk: Desk, stack: Path) -> None:
    answer = slipstream("run", "create", RECIPE, "--set", "target.model=some/model")
    assert answer.status == 0
    assert "serves" not in answer.err
    assert desk.get(f"runs/{RECIPE}")["spec"]["target"]["model"] == "some/model"


def test_another_api_is_not_the_stacks(
    slipstream: Command, desk: Desk, served: Served, stack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = SupervisorState.model_validate_json(Home(stack).supervisor_file.read_text())
    other = state.model_copy(update={"api": "http://127.0.0.1:1"})
    Home(stack).supervisor_file.write_text(other.model_dump_json())
    answer = slipstream("run", "create", RECIPE)
    assert answer.status == 0
    assert "/" in desk.get(f"runs/{RECIPE}")["spec"]["target"]["model"]
    assert not Path(desk.get(f"runs/{RECIPE}")["spec"]["target"]["model"]).is_absolute()
