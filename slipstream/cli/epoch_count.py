"""How long a run of `train.epochs` is: asked of `target-server length`, where the data is on this machine."""

import subprocess
import sys
import tempfile
from pathlib import Path

from slipstream.child_processes import child_process, sigterm_as_exit
from slipstream.epoch_length import EpochLength
from slipstream.run_spec.data_entries import is_hub_name
from slipstream.run_spec.load import LoadedSpec, describe

_SECONDS = 120.0
"""For a few thousand records and a tokenizer: some seconds are usual."""


def count_epochs(loaded: LoadedSpec) -> EpochLength | str:
    """Packs of the recipe's epochs, or in words why they are not known; nothing is downloaded."""
    spec = loaded.spec
    assert spec.train.epochs is not None
    of_hub = [entry for entry in spec.data.files if is_hub_name(entry)]
    if of_hub:
        return f"the data set {of_hub[0]} is the hub's, and is not looked up"
    sys.stderr.write("counting the packs of the data …\n")
    with tempfile.TemporaryDirectory(prefix="slipstream-length-") as directory:
        recipe, report, log = (Path(directory) / name for name in ("recipe.toml", "report.json", "log"))
        recipe.write_text(describe(loaded), encoding="utf-8")
        arguments = ["--epochs", str(spec.train.epochs), "--report", str(report), "--log-level", "error"]
        command = [sys.executable, "-m", "target_server", "length", str(recipe), *arguments]
        with log.open("wb") as output, sigterm_as_exit(), child_process(command, output=output) as process:
            try:
                process.wait(_SECONDS)
            except subprocess.TimeoutExpired:
                return f"the data was not counted within {_SECONDS:g} s"
        if report.exists():
            return EpochLength.model_validate_json(report.read_bytes())
        said = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line.removeprefix("error: ").rstrip(".") for line in said if line.startswith("error: ")]
    return errors[0] if errors else f"`target-server length` ended with status {process.returncode}"
