"""What could not be written in the end is refused before the work begins."""

import os
from pathlib import Path

import pytest

from slipstream.disk import require_place
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason


def refusal(path: Path, *, directory: bool = False) -> str:
    with pytest.raises(SlipstreamError) as caught:
        require_place(path, flag="--output", directory=directory)
    assert caught.value.reason is Reason.PATH_NOT_ALLOWED and caught.value.remedy
    return caught.value.message


def test_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.json").touch()
    for path in (Path("new.json"), tmp_path / "new.json", tmp_path / "old.json"):
        require_place(path, flag="--output")
    for path in (Path("new"), tmp_path):
        require_place(path, flag="--report", directory=True)
    assert refusal(tmp_path) == f"--output: {tmp_path} is a directory, expected a file"
    assert refusal(tmp_path / "old.json", directory=True).endswith("old.json is a file, expected a directory")
    assert refusal(tmp_path / "no" / "where.json") == f"--output: there is no directory {tmp_path}/no for where.json"
    assert refusal(Path("no/where.json")).startswith("--output: there is no directory ")
    assert refusal(tmp_path / "old.json" / "x").startswith("--output: there is no directory ")
    assert not (tmp_path / "no").exists(), "nothing is made"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_places_of_others(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert refusal(tmp_path / "new.json") == f"--output: {tmp_path} may not be written by this user"
    tmp_path.chmod(0o700)
