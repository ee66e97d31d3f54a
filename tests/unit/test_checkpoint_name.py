"""RUN[@STEP] of a command line."""

from pathlib import Path

import pytest

from slipstream.checkpoint_name import SavedSteps, find_checkpoint, split_name
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason


def make_run(directory: Path) -> Path:
    """Two checkpoints, the older one is the best."""
    checkpoints = directory / "checkpoints"
    for step in (5, 10):
        (checkpoints / f"step-{step:08d}").mkdir(parents=True)
    (checkpoints / "latest").symlink_to("step-00000010")
    (checkpoints / "best").symlink_to("step-00000005")
    return directory


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a home of a local stack beside it."""
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path / "home"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def test_a_name_is_a_run_here_or_in_the_local_stack(here: Path) -> None:
    in_stack = make_run(here.parent / "home" / "runs" / "demo")
    assert find_checkpoint("demo") == in_stack
    make_run(here / "runs" / "demo")
    assert find_checkpoint("demo") == Path("runs/demo")
    make_run(here / "demo")
    assert find_checkpoint("demo") == Path("demo")


def test_a_step_behind_a_name_or_a_path(here: Path) -> None:
    checkpoints = make_run(here / "runs" / "demo") / "checkpoints"
    assert find_checkpoint("demo@5").samefile(checkpoints / "step-00000005")
    assert find_checkpoint("demo@step-00000005").samefile(checkpoints / "step-00000005")
    assert find_checkpoint("demo@latest") == find_checkpoint("demo") == Path("runs/demo")
    assert find_checkpoint("demo@best").samefile(checkpoints / "step-00000005")
    assert find_checkpoint("runs/demo@best").samefile(checkpoints / "step-00000005")
    (checkpoints / "best").unlink()
    with pytest.raises(SlipstreamError, match="runs/demo has no best checkpoint"):
        find_checkpoint("demo@best")
    with pytest.raises(SlipstreamError, match="runs/demo has no checkpoint of step 7"):
        find_checkpoint("demo@7")


def test_names_are_split_at_the_last_at() -> None:
    found = [split_name(text) for text in ("demo", "demo@7", "a@b/run@best", "demo@")]
    assert found == [("demo", ""), ("demo", "7"), ("a@b/run", "best"), ("demo", "")]


def test_a_run_without_checkpoints_has_no_best_one_yet_either() -> None:
    for choice in ("", "latest", "best", "7"):
        with pytest.raises(SlipstreamError, match=r"^run demo has no checkpoint yet\. One is written every "):
            SavedSteps("run demo", (), None, None).choose(choice)


def test_a_path_with_an_at_is_what_it_is(here: Path) -> None:
    (here / "run@5").mkdir()
    assert find_checkpoint("run@5") == Path("run@5")


@pytest.mark.parametrize("text", ["nobody", "nobody@5", "nobody@best"])
def test_what_was_looked_for_is_named(text: str, here: Path) -> None:
    with pytest.raises(SlipstreamError) as caught:
        find_checkpoint(text)
    places = f"nobody, runs/nobody, {here.parent / 'home' / 'runs' / 'nobody'}"
    assert caught.value.message == f"there is no checkpoint or run 'nobody'; looked for {places}"
    assert caught.value.reason is Reason.CHECKPOINT_INVALID and caught.value.remedy
    with pytest.raises(SlipstreamError, match="looked for no/where. Name"):
        find_checkpoint("no/where")
