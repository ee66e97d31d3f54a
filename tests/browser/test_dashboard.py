"""The dashboard in a real Chromium, in front of a real control API, trainer agent and target server."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from control_api.routes.dashboard import DIRECTORY
from tests.fakes.processes import ADDRESS, ManagedProcess, Processes
from tests.fakes.tiny_run import RECIPE, write_tiny_run

HERE = Path(__file__).parent
TOKEN = "s3cret-of-the-test"
# Longer than any test lasts: the run is stopped, it never ends by itself.
OVERRIDES = ["train.max_steps=100000", "checkpoint.every_steps=200"]
IMAGES = os.environ.get("SLIPSTREAM_DASHBOARD_IMAGES")
"""A directory: the pictures of docs/images are taken anew."""

NODE = shutil.which("node")
CHROMIUM = shutil.which("chromium")

needs_node = pytest.mark.skipif(NODE is None, reason="node is not installed (Debian: apt-get install nodejs npm)")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None or not (HERE / "node_modules" / "playwright-core").is_dir(),
    reason="needs chromium (Debian: apt-get install chromium) and playwright-core (npm ci --prefix tests/browser)",
)


@pytest.fixture
def processes() -> Iterator[Processes]:
    started = Processes()
    yield started
    started.close()


@needs_node
def test_modules(tmp_path: Path) -> None:
    """What needs no browser: the columns behind the charts, the parser of the event stream, numbers as text."""
    shutil.copytree(DIRECTORY, tmp_path / "dashboard")
    (tmp_path / "package.json").write_text('{"type": "module"}')
    shutil.copy(HERE / "modules.test.mjs", tmp_path)
    done = subprocess.run([str(NODE), "--test", tmp_path], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_node
@needs_browser
@pytest.mark.timeout(240)
def test_create_watch_pause_resume_stop(processes: Processes, tmp_path: Path) -> None:
    recipe = write_tiny_run(tmp_path / "tiny")
    text = RECIPE.replace("./target", str(recipe.parent / "target")).replace(
        "conversations.jsonl", str(recipe.parent / "conversations.jsonl")
    )
    environment = {"SLIPSTREAM_TOKEN": TOKEN}
    flags = ("--ledger", tmp_path / "ledger.sqlite", "--probe-bytes", "1MiB", "--subscription-timeout", "5")
    _, target = processes.start_target_server(recipe, *flags, env=environment)

    def start_api(listen: str) -> tuple[ManagedProcess, str]:
        options = ("--database", f"sqlite:///{tmp_path / 'control.sqlite'}", "--data-root", recipe.parent)
        process = processes.start(
            "control_api", "--listen", listen, *options, "--target", f"tiny={target}", env=environment
        )
        return process, process.wait_for_line(rf"listening.*{ADDRESS.pattern}").group(1)

    api, address = start_api("127.0.0.1:0")
    places = ("--runs", tmp_path / "runs", "--state", tmp_path / "agent")
    agent = processes.start(
        "drafter_trainer", "worker", "--api", f"http://{address}", "--name", "box", *places, "--device", "cpu",
        env=environment,
    )  # fmt: skip
    agent.wait_for_line("registered")

    config = {
        "address": f"http://{address}",
        "token": TOKEN,
        "chromium": CHROMIUM,
        "run": "moves",
        "recipe": text,
        "overrides": OVERRIDES,
        "images": IMAGES and str(Path(IMAGES).absolute()),
        "picture_points": 400,
        "picture_rows": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with ManagedProcess([str(NODE), str(HERE / "drive.mjs"), str(tmp_path / "config.json")]) as person:
        person.wait_for_line("=> kill the API", timeout=120)
        api.kill()
        person.wait_for_line("=> start the API", timeout=60)
        start_api(address)
        person.wait_for_line("ok all done", timeout=120)
        assert person.wait_exit() == 0
