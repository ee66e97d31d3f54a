"""Where compiled code is kept, and what is said where it cannot be. Turns are in tests/system/test_compile_cache.py."""

import errno
import os
import shutil
import threading
from pathlib import Path

import pytest

from drafter_trainer import compile_cache
from drafter_trainer.compile_cache import INDUCTOR, SETTING, TRITON, compiling_turn, use_compile_cache
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason

BUILT_FOR = ("torch-2.11.0+cu130", "triton-3.6.0", "NVIDIA H200")
FOLDER = "torch-2.11.0+cu130_triton-3.6.0_NVIDIA-H200"


def said(log: pytest.LogCaptureFixture) -> dict[str, dict[str, object]]:
    return {record.message: record.slipstream_fields for record in log.records}  # type: ignore[attr-defined]


def test_the_default_is_one_folder_of_the_user_per_kind_of_machine(tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    folder = use_compile_cache(environment, built_for=BUILT_FOR)
    assert folder == tmp_path / "slipstream" / "compiled" / FOLDER / "inductor" and folder.is_dir()
    assert environment[INDUCTOR] == str(folder) and environment[TRITON] == str(folder.parent / "triton")
    other = use_compile_cache({"XDG_CACHE_HOME": str(tmp_path)}, built_for=(*BUILT_FOR[:2], "NVIDIA L4"))
    assert other is not None and other != folder


def test_a_volume_may_be_named(tmp_path: Path) -> None:
    environment = {SETTING: str(tmp_path / "volume"), TRITON: "/elsewhere"}
    assert use_compile_cache(environment, built_for=BUILT_FOR) == tmp_path / "volume" / FOLDER / "inductor"
    assert environment[TRITON] == "/elsewhere"


def test_what_is_set_for_torch_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    environment = {INDUCTOR: str(tmp_path), SETTING: "/another"}
    assert use_compile_cache(environment, built_for=BUILT_FOR) == tmp_path
    assert environment == {INDUCTOR: str(tmp_path), SETTING: "/another"}
    assert said(caplog)["compile_cache"]["because"] == f"{INDUCTOR} is set"


def test_off_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    environment = {SETTING: "off"}
    assert use_compile_cache(environment, built_for=BUILT_FOR) is None
    assert environment == {SETTING: "off"}
    assert said(caplog)["compile_cache"]["because"] == f"{SETTING} is off"
    with compiling_turn(None, "anything", threading.Event()):
        pass


def unusable(kind: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "full":
        usage = shutil.disk_usage(directory)._replace(free=300 << 20)
        monkeypatch.setattr(compile_cache.shutil, "disk_usage", lambda _: usage)
    elif kind == "no directory":
        (directory / "cache").write_text("a file is in the way")
    else:

        def refuse(*_: object, **__: object) -> None:
            raise OSError(30, os.strerror(30))  # EROFS: root may write anywhere else

        monkeypatch.setattr(compile_cache.tempfile, "TemporaryFile", refuse)


@pytest.mark.parametrize(
    ("kind", "words", "reason"),
    [
        ("full", "has 300 MiB of room, it needs 512 MiB", Reason.DISK_FULL),
        ("read-only", "cannot be written: Read-only file system", Reason.PATH_NOT_ALLOWED),
        ("no directory", "cannot be written: Not a directory", Reason.PATH_NOT_ALLOWED),
    ],
)
def test_a_directory_that_cannot_be_used_is_refused_where_it_was_asked_for(
    kind: str,
    words: str,
    reason: Reason,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    unusable(kind, tmp_path, monkeypatch)
    with pytest.raises(SlipstreamError, match=words) as refused:
        use_compile_cache({SETTING: str(tmp_path / "cache")}, built_for=BUILT_FOR)
    assert refused.value.reason is reason and f"{SETTING}=off" in refused.value.remedy
    assert str(tmp_path / "cache" / FOLDER) in refused.value.message
    # By default it is a warning, and torch does what it did before.
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert use_compile_cache(environment, built_for=BUILT_FOR) is None and INDUCTOR not in environment
    warning = said(caplog)["compile_cache_unusable"]
    assert words in str(warning["detail"]) and warning["instead"] == "torch's own directory"


def test_a_failure_leaves_no_mark_and_gives_the_turn_back(tmp_path: Path) -> None:
    stop = threading.Event()
    with pytest.raises(RuntimeError), compiling_turn(tmp_path, "a shape", stop):
        raise RuntimeError("compilation failed")
    assert not list(tmp_path.glob("compiled-*"))
    with compiling_turn(tmp_path, "a shape", stop):
        pass
    assert len(list(tmp_path.glob("compiled-*"))) == 1


@pytest.mark.parametrize("kind", ["a lock that is another user's", "a file system without locks"])
def test_without_a_lock_everybody_compiles_and_it_is_said(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    folder = tmp_path / "cache"
    if kind == "a file system without locks":
        monkeypatch.setattr(compile_cache.fcntl, "flock", refuse)
    else:
        folder.touch()  # root may open any file; a file in the way is refused to it as well
    with compiling_turn(folder, "a shape", threading.Event()):
        pass
    assert said(caplog)["compile_cache_without_turns"]["detail"] in ("No locks available", "File exists")
