"""Whose answers a run learns from, by what `data regenerate` leaves beside them."""

import json
from pathlib import Path

import pytest

import recipes
from slipstream.answers_settings import settings_beside
from slipstream.data_answers import Unproven, answers_remark, first_unproven


def written(path: Path, target: str | None, fingerprint: str = "f") -> str:
    """A file of answers; a target of None leaves no record."""
    path.write_text("{}\n")
    if target is not None:
        settings_beside(path).write_text(json.dumps({"target": target, "target_fingerprint": fingerprint}))
    return str(path)


def test_the_targets_own(tmp_path: Path) -> None:
    own = written(tmp_path / "own.jsonl", "elsewhere/target")
    assert first_unproven([own], "./target", ("e", "f")) is None, "the fingerprint decides"
    assert first_unproven([own], "elsewhere/target") is None, "without one the name does"
    assert answers_remark([own], "elsewhere/target") is None and answers_remark([own], "/models/target") is None
    assert "elsewhere/target, not the target, wrote" in str(answers_remark([own], "t"))
    packed = tmp_path / "packed.jsonl"
    written(packed, "t")
    packed.rename(tmp_path / "packed.jsonl.gz")
    assert first_unproven([str(tmp_path / "packed.jsonl.gz")], "t", ("f",)) is None


def test_anothers_come_before_what_nobody_signed(tmp_path: Path) -> None:
    unsigned, other = written(tmp_path / "a.jsonl", None), written(tmp_path / "b.jsonl", "/models/big.gguf", "b")
    assert first_unproven([unsigned], "t", ("f",)) == Unproven("a.jsonl", None, None)
    expected = Unproven("b.jsonl", "big.gguf", "b")
    for entries in ([unsigned, other], [str(tmp_path)], [str(tmp_path / "*.jsonl")]):
        assert first_unproven(entries, "t", ("f",)) == expected


def test_a_namesake_of_other_weights_is_not_called_another_model(tmp_path: Path) -> None:
    """A hub's model and its copy in a directory differ in their fingerprints, for the revision is in one of them."""
    copied = written(tmp_path / "a.jsonl", "owner/target", "of the hub's")
    assert first_unproven([copied], "/models/target", ("f",)) == Unproven("a.jsonl", None, "of the hub's")


def test_of_a_directory_only_what_is_read_from_it_counts(tmp_path: Path) -> None:
    """Data files below it, of the train split where there is one: as the target server takes them."""
    (tmp_path / "train").mkdir()
    written(tmp_path / "train" / "own.jsonl", "t")
    for name in ("README.md", "dataset_info.json", "test.jsonl"):
        written(tmp_path / name, None)
    assert first_unproven([str(tmp_path)], "t", ("f",)) is None
    written(tmp_path / "train" / "other.parquet", None)
    assert first_unproven([str(tmp_path)], "t", ("f",)) == Unproven("other.parquet", None, None)


def test_of_a_pattern_files_count_not_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "more" / "below").mkdir(parents=True)
    written(tmp_path / "more" / "own.jsonl", "t")
    for pattern in ("*/*", "**/*"):
        assert first_unproven([str(tmp_path / pattern)], "t", ("f",)) is None
    monkeypatch.chdir(tmp_path)
    # Whether it matches files, too, is a matter of Python's version.
    assert first_unproven(["**"], "t", ("f",)) in (None, Unproven("**", None, None))


@pytest.mark.parametrize("entry", ["hf://datasets/owner/name", "/nowhere/talks.jsonl", "gone-*.jsonl", "a**b"])
def test_what_is_not_here_is_not_known(entry: str) -> None:
    assert first_unproven([entry], "t", ("f",)) == Unproven(entry, None, None)


def test_a_damaged_record_says_nothing(tmp_path: Path) -> None:
    file = written(tmp_path / "a.jsonl", "t")
    settings_beside(Path(file)).write_text("[1]")
    assert first_unproven([file], "t", ("f",)) == Unproven("a.jsonl", None, None)


def test_what_ships_was_written_by_the_target_of_its_recipes() -> None:
    shipped = str(recipes.data_file("data/demo_conversations.jsonl.gz"))
    assert first_unproven([shipped], "HuggingFaceTB/SmolLM2-135M-Instruct", ("f",)) is None
    assert first_unproven([shipped], "/models/SmolLM2-135M-Instruct.Q4_1.gguf", ("f",)) is None
    assert first_unproven([shipped], "Qwen/Qwen3-8B", ("f",)) is not None
