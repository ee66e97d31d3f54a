"""The dashboard in a real Chromium, in front of a real control API, trainer agent and target server."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from control_api.routes.dashboard import DIRECTORY
from slipstream.control_client import ControlClient
from tests.fakes.processes import ADDRESS, ManagedProcess, Processes
from tests.fakes.tiny_run import RECIPE, write_tiny_run

HERE = Path(__file__).parent
TOKEN = "s3cret-of-the-test"
# Longer than any test lasts: the run is stopped, it never ends by itself.
IMAGES = os.environ.get("SLIPSTREAM_DASHBOARD_IMAGES")
"""A directory for new pictures; the documents' are in docs/images."""
OVERRIDES = [f"train.max_steps={12_000 if IMAGES else 100_000}", "checkpoint.every_steps=200"]

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
@pytest.mark.timeout(480 if IMAGES else 240)
def test_create_watch_pause_resume_stop(processes: Processes, tmp_path: Path) -> None:
    recipe = write_tiny_run(tmp_path / "tiny")
    if not IMAGES:
        with (recipe.parent / "conversations.jsonl").open("a") as file:
            file.write("no JSON\n")
    text = RECIPE.replace("./target", str(recipe.parent / "target")).replace(
        "conversations.jsonl", str(recipe.parent / "conversations.jsonl")
    )
    environment = {"SLIPSTREAM_TOKEN": TOKEN}
    flags = ("--ledger", tmp_path / "ledger.sqlite", "--probe-bytes", "1MiB", "--subscription-timeout", "5")
    _, target = processes.start_target_server(recipe, *flags, env=environment)

    def start_api(listen: str) -> tuple[ManagedProcess, str]:
        options = ("--database", f"sqlite:///{tmp_path / 'control.sqlite'}", "--data-root", recipe.parent)
        options += ("--export-root", tmp_path / "exports")
        process = processes.start(
            "control_api", "--listen", listen, *options, "--target", f"tiny={target}", env=environment
        )
        return process, process.wait_for_line(rf"listening.*{ADDRESS.pattern}").group(1)

    api, address = start_api("127.0.0.1:0")

    def start_agent(name: str) -> None:
        places = ("--name", name, "--runs", tmp_path / "runs", "--state", tmp_path / name)
        options = ("--api", f"http://{address}", *places, "--device", "cpu")
        processes.start("drafter_trainer", "worker", *options, env=environment).wait_for_line("registered")

    start_agent("box")

    config = {
        "address": f"http://{address}",
        "token": TOKEN,
        "chromium": CHROMIUM,
        "run": "moves",
        "recipe": text,
        "overrides": OVERRIDES,
        "images": IMAGES and str(Path(IMAGES).absolute()),
        "picture_points": 400,
        "picture_rows": 3,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with ManagedProcess([str(NODE), str(HERE / "drive.mjs"), str(tmp_path / "config.json")]) as person:
        if IMAGES:
            person.wait_for_line("=> more runs", timeout=120)
            start_agent("box-2")
            _make_more_runs(ControlClient(f"http://{address}", TOKEN), text)
        person.wait_for_line("=> kill the API", timeout=120)
        api.kill()
        person.wait_for_line("=> start the API", timeout=60)
        start_api(address)
        person.wait_for_line("ok .* all done", timeout=120)
        assert person.wait_exit() == 0


def _make_more_runs(api: ControlClient, recipe: str) -> None:
    """A list worth a picture: a run that has ended, one that has failed, one that is paused, one that waits."""

    def create(name: str, *overrides: str, note: str = "", until: str = "") -> None:
        body = {"recipe": recipe, "overrides": [f"name={name}", *overrides], "note": note}
        api.post("/v1/runs", body)
        deadline = time.monotonic() + 120
        while until and api.get(f"/v1/runs/{name}")["state"] != until:
            assert time.monotonic() < deadline, api.get(f"/v1/runs/{name}")
            time.sleep(0.2)

    create("first-light", "train.max_steps=400", note="the smallest drafter that learns", until="SUCCEEDED")
    create("too-deep", "drafter.target_layer_ids=[1,40]", until="FAILED")
    create("block-8", "train.max_steps=2000", "drafter.block_size=8", note="twice the block", until="RUNNING")
    while api.get("/v1/runs/block-8")["progress"]["step"] < 300:
        time.sleep(0.5)
    api.post("/v1/runs/block-8:pause")
    create("two-layers", "train.max_steps=2000", "drafter.num_layers=2", note="as soon as a trainer is free")
