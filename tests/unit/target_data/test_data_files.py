"""Which files a recipe's `data.files` name: globs, directories, saved data sets, hub names."""

import json
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pytest
from huggingface_hub import constants

from slipstream.errors import SlipstreamError
from slipstream.run_spec.data_entries import directories_of
from slipstream.run_spec.reasons import Reason
from target_server import data_files
from target_server.data_files import find_files


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}\n")


def names(*entries: object, roots: list[Path] | None = None) -> list[str]:
    return [file.name for file in find_files([str(entry) for entry in entries], roots)]


def refused(*entries: object, roots: list[Path] | None = None) -> SlipstreamError:
    with pytest.raises(SlipstreamError) as caught:
        names(*entries, roots=roots)
    assert caught.value.remedy
    return caught.value


def test_a_directory_gives_its_data_files_by_name(tmp_path: Path) -> None:
    touch(*(tmp_path / name for name in ("b.parquet", "a/x.jsonl.gz", "README.md", ".cache/z.jsonl", "c.json")))
    touch(tmp_path / "dataset_info.json")
    touch(tmp_path / "a.jsonl.settings.json")  # what `data regenerate` leaves beside it
    assert names(tmp_path) == ["a/x.jsonl.gz", "b.parquet", "c.json"]
    (tmp_path / "empty").mkdir()
    assert "holds no data file" in refused(tmp_path / "empty").message


def test_a_directory_with_splits_gives_train(tmp_path: Path) -> None:
    parts = ("data/train-00001-of-00002.parquet", "data/train-00000-of-00002.parquet", "data/test-00000.parquet")
    touch(*(tmp_path / name for name in (*parts, "training-notes.json", "constraints.jsonl")))
    assert names(tmp_path) == ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]
    assert names(tmp_path / "data" / "test*") == ["test-00000.parquet"]


def test_what_save_to_disk_wrote(tmp_path: Path) -> None:
    """The layout of a saved DatasetDict; shards in the order of state.json."""
    shards = ["data-00001-of-00002.arrow", "data-00000-of-00002.arrow"]
    for split in ("train", "test"):
        directory = tmp_path / split
        directory.mkdir()
        table = pyarrow.Table.from_pylist([{"prompt": split, "completion": "b"}])
        for shard in shards:
            with pyarrow.ipc.new_stream(directory / shard, table.schema) as writer:
                writer.write_table(table)
        touch(directory / "dataset_info.json")
        (directory / "state.json").write_text(json.dumps({"_data_files": [{"filename": shard} for shard in shards]}))
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert names(tmp_path) == [f"train/{shard}" for shard in shards]
    assert names(tmp_path / "test") == shards
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["test", "validation"]}')
    assert "without `train`: test, validation" in refused(tmp_path).message
    (tmp_path / "dataset_dict.json").write_text("{")
    assert "it is not JSON" in refused(tmp_path).message


def test_globs(tmp_path: Path) -> None:
    touch(*(tmp_path / name for name in ("b.jsonl", "a.jsonl", "c.txt", "deep/er/d.jsonl")))
    assert names(tmp_path / "*.jsonl") == ["a.jsonl", "b.jsonl"]
    assert names(tmp_path / "**" / "*.jsonl") == ["a.jsonl", "b.jsonl", "deep/er/d.jsonl"]
    assert "No file matches" in refused(tmp_path / "*.csv").message
    touch(tmp_path / "odd[1].jsonl")
    assert names(tmp_path / "odd[1].jsonl") == ["odd[1].jsonl"]


def test_links_out_of_the_roots_are_refused(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    touch(inside / "a.jsonl", outside / "b.jsonl")
    (inside / "link.jsonl").symlink_to(outside / "b.jsonl")
    assert names(inside / "a*", roots=[inside]) == ["a.jsonl"]
    for entry in (inside, inside / "*.jsonl", outside, outside / "*.jsonl", "hf://datasets/owner/name"):
        assert refused(entry, roots=[inside]).reason is Reason.PATH_NOT_ALLOWED


@pytest.mark.parametrize(
    ("entry", "asked"),
    [
        ("hf://datasets/owner/name", ("owner/name", None, None)),
        ("hf://datasets/owner/name@v1.0", ("owner/name", "v1.0", None)),
        ("hf://datasets/owner/name@refs%2Fpr%2F1/data/train-*.parquet", ("owner/name", "refs/pr/1", "data/train-*")),
    ],
)
def test_hub_names_say_what_is_downloaded(
    tmp_path: Path, entry: str, asked: tuple[str, str | None, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def download(name: str, revision: str | None, pattern: str | None) -> Path:
        calls.append((name, revision, pattern and pattern.removesuffix(".parquet")))
        return tmp_path

    monkeypatch.setattr(data_files, "_download", download)
    touch(tmp_path / "data" / "train-1.parquet", tmp_path / "data" / "test-1.parquet")
    assert names(entry) == ["data/train-1.parquet"]
    assert calls == [asked]
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert names(entry, roots=[tmp_path]) == ["data/train-1.parquet"]


@pytest.mark.parametrize(
    "entry", ["hf://owner/name", "hf://datasets/name", "hf://datasets/a/b@", "hf://datasets/a/b/../../etc/passwd"]
)
def test_hub_names_that_are_none(entry: str) -> None:
    assert refused(entry).reason is Reason.DATA_INVALID


def test_a_hub_that_cannot_be_reached_is_named_with_the_way_out() -> None:
    """The tests run with HF_HUB_OFFLINE."""
    error = refused("hf://datasets/owner/none@0123abc")
    assert error.reason is Reason.DATA_INVALID
    assert "'owner/none' at revision '0123abc'" in error.message and "network" in error.remedy


def test_directories_that_a_server_may_read_for_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    entries = ("a/x.jsonl", "b/*/y*.jsonl", "saved", "hf://datasets/owner/name/data/*.parquet")
    found = directories_of([entry if entry.startswith("hf:") else str(tmp_path / entry) for entry in entries])
    assert found == [tmp_path / "a", tmp_path / "b", tmp_path / "saved"]


def test_an_address_of_the_web_is_downloaded_first(tmp_path: Path) -> None:
    found = refused(tmp_path / "https://hub/talks.jsonl")
    assert "does not exist" in found.message and found.remedy.startswith("Download it and name the file; a data set")
