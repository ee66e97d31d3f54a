"""An export appears whole or not at all: killed, or on a full disk."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from drafter_trainer.formats.new_directory import new_directory
from slipstream.errors import SlipstreamError
from tests.unit.formats.conftest import Source

KILLED = """
import os, signal, sys
from pathlib import Path
from drafter_trainer.formats.new_directory import new_directory
renames = 0
rename = Path.rename
def counted(self, target):
    global renames
    renames += 1
    if renames == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(self, target)
Path.rename = counted
with new_directory(Path(sys.argv[1]), replace=True) as directory:
    (directory / "part").write_text("new")
    (directory / "slipstream.json").write_text("{}")
    if sys.argv[2] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
"""


def killed(path: Path, when: int) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    child = subprocess.run([sys.executable, "-P", "-c", KILLED, str(path), str(when)], env=environment, timeout=60)
    assert child.returncode == -signal.SIGKILL


def an_export(path: Path) -> Path:
    path.mkdir()
    (path / "part").write_text("old")
    (path / "slipstream.json").write_text("{}")
    return path


@pytest.mark.parametrize("when", [0, 1])
def test_kill_leaves_no_half_directory(when: int, tmp_path: Path) -> None:
    path = tmp_path / "out"
    killed(path, when)
    assert not path.exists()
    assert [entry.name.split(".")[1] for entry in tmp_path.iterdir()] == ["unfinished-out"]
    with new_directory(path, replace=False) as directory:
        (directory / "part").write_text("whole")
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("when", [0, 1, 2])
def test_kill_while_replacing_loses_nothing(when: int, tmp_path: Path) -> None:
    path = an_export(tmp_path / "out")
    killed(path, when)
    # Killed between the two renames, the old one waits under its other name until the next export.
    with pytest.raises(RuntimeError), new_directory(path, replace=True):
        raise RuntimeError
    assert (path / "part").read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_what_was_about_to_be_replaced_is_not_taken_for_a_free_name(tmp_path: Path) -> None:
    """A kill between the two renames of --force; then an export without it."""
    path = an_export(tmp_path / "out")
    killed(path, 2)
    assert not path.exists()
    with pytest.raises(SlipstreamError, match="exists already"), new_directory(path, replace=False):
        pytest.fail("nothing is to be written")
    assert (path / "part").read_text() == "old"


def test_of_two_exports_at_once_the_slower_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with pytest.raises(SlipstreamError, match="exists already"), new_directory(path, replace=False) as directory:
        (directory / "part").write_text("slower")
        an_export(path)
    assert (path / "part").read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("kind", ["run directory", "model", "file", "link"])
def test_only_an_export_is_ever_replaced(kind: str, tmp_path: Path) -> None:
    """--force beside a wrong --output would delete it."""
    path = tmp_path / "precious"
    if kind == "file":
        path.write_text("mine")
    elif kind == "link":
        path.symlink_to(an_export(tmp_path / "export"))
    else:
        path.mkdir()
        (path / ("config.json" if kind == "model" else "checkpoints")).mkdir()
    with pytest.raises(SlipstreamError) as refused, new_directory(path, replace=True):
        pytest.fail("nothing is to be written")
    assert "--force replaces only" in refused.value.remedy and path.exists()


def test_a_name_that_no_file_system_takes(tmp_path: Path) -> None:
    with (
        pytest.raises(SlipstreamError, match="could not be written"),
        new_directory(tmp_path / ("a" * 300), replace=False),
    ):
        pytest.fail("nothing is to be written")


def test_a_full_disk_is_said_in_words(source: Source, tmp_path: Path) -> None:
    """A limit on the size of files is refused by the kernel as a full disk is, but for the number of the error."""
    code = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from drafter_trainer.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    flags = ["export", str(source.run), "--to", "vllm", "--output", str(tmp_path / "out"), "--without-self-test"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    child = subprocess.run(
        [sys.executable, "-P", "-c", code, *flags], env=environment, capture_output=True, text=True, timeout=60
    )
    assert child.returncode == 3, child.stderr
    assert "out could not be written: File too large" in child.stderr and "Traceback" not in child.stderr
    assert not list(tmp_path.iterdir())
