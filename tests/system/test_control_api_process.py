"""The control API as a process: serves, says where, and leaves when told."""

import json
import urllib.request

from tests.fakes.processes import ADDRESS, Processes


def test_serves_until_sigterm() -> None:
    processes = Processes()
    try:
        process = processes.start("control_api.cli", "--listen", "127.0.0.1:0")
        address = process.wait_for_line(ADDRESS).group(1)
        with urllib.request.urlopen(f"http://{address}/healthz", timeout=10) as response:
            assert json.load(response)["status"] == "ok"
        process.terminate()
        process.wait_exit()
        assert "Traceback" not in process.output
    finally:
        processes.close()


def test_refuses_in_words() -> None:
    processes = Processes()
    try:
        process = processes.start("control_api.cli", "--listen", "0.0.0.0:0", env={"SLIPSTREAM_TOKEN": ""})
        assert process.wait_exit() == 2
        assert process.output.startswith("error: 0.0.0.0:0 is reachable from other machines")
        assert "remedy: Set SLIPSTREAM_TOKEN" in process.output
    finally:
        processes.close()
