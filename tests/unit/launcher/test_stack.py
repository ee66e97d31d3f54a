"""stack.json: read back as written, refused in words when damaged, changed only while a stack is up."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.errors import SlipstreamError
from slipstream.launcher.home import Home, home_directory, is_up, read_supervisor, take_over, try_lock
from slipstream.launcher.stack import add_trainer, free_name, read_stack, remove_trainer, write_stack
from slipstream.run_spec.reasons import Reason
from tests.unit.launcher.stacks import a_stack


@pytest.fixture
def home_that_is_up(tmp_path: Path) -> Iterator[Path]:
    write_stack(tmp_path, a_stack())
    lock = take_over(tmp_path)
    assert lock is not None
    with lock:
        yield tmp_path


def test_read_back_as_written(tmp_path: Path) -> None:
    assert read_stack(tmp_path) is None
    write_stack(tmp_path, a_stack())
    assert read_stack(tmp_path) == a_stack()
    assert [entry.name for entry in tmp_path.iterdir()] == ["stack.json"], "no draft is left"


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"version": 2}', "\x00"])
def test_a_damaged_stack_is_refused_in_words(tmp_path: Path, text: str) -> None:
    Home(tmp_path).stack_file.write_text(text)
    with pytest.raises(SlipstreamError, match="is no stack") as refused:
        read_stack(tmp_path)
    assert refused.value.reason is Reason.SPEC_INVALID and "Remove it" in refused.value.remedy
    Home(tmp_path).stack_file.unlink()
    assert read_stack(tmp_path) is None, "the remedy helps"


def test_a_damaged_state_is_refused_in_words(tmp_path: Path) -> None:
    assert read_supervisor(tmp_path) is None
    Home(tmp_path).supervisor_file.write_text("{}")
    with pytest.raises(SlipstreamError, match="is damaged"):
        read_supervisor(tmp_path)


def test_trainers_are_added_and_removed_while_it_is_up(home_that_is_up: Path) -> None:
    assert add_trainer(home_that_is_up, "cpu") == "cpu-2"
    assert add_trainer(home_that_is_up, "cuda:5") == "gpu5"
    assert add_trainer(home_that_is_up, "cpu", name="mine", threads=3) == "mine"
    remove_trainer(home_that_is_up, "cpu")
    stack = read_stack(home_that_is_up)
    assert stack is not None
    assert [(one.name, one.device, one.threads) for one in stack.trainers] == [
        ("cpu-2", "cpu", 1),
        ("gpu5", "cuda:5", None),
        ("mine", "cpu", 3),
    ]


def test_bad_trainers_are_refused(home_that_is_up: Path) -> None:
    def refused(device: str, name: str | None = None) -> Reason:
        with pytest.raises(SlipstreamError) as caught:
            add_trainer(home_that_is_up, device, name=name)
        return caught.value.reason

    assert refused("tpu") is Reason.SPEC_INVALID
    assert refused("cuda:x") is Reason.SPEC_INVALID
    assert refused("cpu", "cpu") is Reason.NAME_TAKEN
    assert refused("cpu", "target") is Reason.NAME_TAKEN
    assert refused("cpu", "../cpu") is Reason.SPEC_INVALID
    with pytest.raises(SlipstreamError, match="no trainer 'none'") as unknown:
        remove_trainer(home_that_is_up, "none")
    assert unknown.value.remedy.startswith("Its trainers: cpu. ")
    assert read_stack(home_that_is_up) == a_stack()


def test_nothing_is_added_where_nothing_is_up(tmp_path: Path) -> None:
    for change in (lambda: add_trainer(tmp_path, "cpu"), lambda: remove_trainer(tmp_path, "cpu")):
        with pytest.raises(SlipstreamError, match="no stack is up") as refused:
            change()
        assert refused.value.reason is Reason.NOT_READY
    assert not list(tmp_path.iterdir())


def test_names_follow_devices() -> None:
    assert free_name("cuda", []) == "gpu"
    assert free_name("cuda:7", ["cpu"]) == "gpu7"
    assert free_name("cpu", ["cpu", "cpu-2", "cpu-4"]) == "cpu-3"


def test_only_one_holds_a_home(tmp_path: Path) -> None:
    home = tmp_path / "new" / "home"
    assert not is_up(home)
    first = take_over(home)
    assert first is not None
    assert is_up(home) and take_over(home) is None and try_lock(Home(home).supervisor_lock) is None
    first.close()
    assert not is_up(home)


def test_a_home_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SlipstreamError, match="could not be written") as refused:
        take_over(tmp_path / "file" / "home")
    assert refused.value.reason is Reason.PATH_NOT_ALLOWED and "--home" in refused.value.remedy
    assert not is_up(tmp_path / "file" / "home")


def test_which_home_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SLIPSTREAM_HOME", raising=False)
    assert home_directory() == tmp_path / ".slipstream"
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path / "b"))
    assert home_directory() == tmp_path / "b"
    assert home_directory(Path("~/c")) == tmp_path / "c"
