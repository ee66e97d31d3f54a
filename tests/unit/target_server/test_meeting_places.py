"""Where engines meet: a directory lives as long as the process that made it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from target_server.meeting_places import MeetingPlaces, remove_stale_places
from tests.fakes.processes import import_path

OWNER = """
import pathlib, sys
from target_server.meeting_places import MeetingPlaces
places = MeetingPlaces(pathlib.Path(sys.argv[1]))
places.next().write_text("here")
print(places.directory.name, flush=True)
sys.stdin.read()
"""


def test_what_a_killed_server_left_is_removed_and_what_a_living_one_has_is_kept(tmp_path: Path) -> None:
    (tmp_path / "somebody-else").mkdir()
    (tmp_path / "slipstream-engines-of-an-older-version").mkdir()
    (tmp_path / "slipstream-engines-a-file").touch()
    ours = MeetingPlaces(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": import_path()},
    ) as owner:
        assert owner.stdout is not None
        theirs = owner.stdout.readline().strip()
        assert remove_stale_places(tmp_path) == ["slipstream-engines-of-an-older-version"]
        owner.send_signal(signal.SIGKILL)
    assert (tmp_path / theirs / "1").exists(), "a killed process cleans nothing up"
    assert remove_stale_places(tmp_path) == [theirs]
    assert ours.directory.is_dir() and ours.next() != ours.next()
    ours.close()
    ours.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["slipstream-engines-a-file", "somebody-else"]
