"""How many packs the epochs of a run have: counted where that is quick, else estimated."""

import gzip
import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from slipstream.errors import SlipstreamError
from slipstream.run_spec.spec import DataSpec
from target_server import dataset, epoch_length
from target_server.data_files import find_files
from target_server.dataset import load_documents
from target_server.epoch_length import measure_epochs
from target_server.packing import PackSequence

SIZES = [20 + 7 * number % 90 for number in range(400)]


def write_rows(path: Path, sizes: list[int]) -> str:
    rows = [{"input_ids": [5] * size, "loss_mask": [0] + [1] * (size - 1)} for size in sizes]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def packs_of(data: DataSpec, tokenizer: PreTrainedTokenizerFast, epochs: int) -> int:
    documents = load_documents(data, tokenizer, files=find_files(data.files, None), split="train").documents
    sequence = PackSequence(
        documents, pack_tokens=data.pack_tokens, seed=data.seed, window_documents=data.window_documents
    )
    return sequence.total_packs(epochs)


def test_small_data_is_counted_and_an_index_is_used(
    tmp_path: Path, chatml: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = DataSpec(files=(write_rows(tmp_path / "a.jsonl", SIZES),), pack_tokens=256, heldout_fraction=0.2)
    files = find_files(data.files, None)
    found = measure_epochs(data, files, chatml, 3)
    assert found.exact and found.source.startswith("counted from all 3")
    assert found.packs == packs_of(data, chatml, 3)
    again = measure_epochs(data, files, chatml, 3)
    assert again.source.startswith("counted from the index of ") and again.packs == found.packs
    monkeypatch.setattr(dataset, "_PARALLEL_FROM_BYTES", 0)
    assert "index" not in measure_epochs(data, files, chatml, 3).source, "large files are not hashed for a plan"
    monkeypatch.setattr(epoch_length, "_MOST_PLANNED", 1)
    many = measure_epochs(data, files, chatml, 1000)
    assert not many.exact and many.packs == pytest.approx(found.packs * 1000 / 3, rel=0.05)


def test_large_data_is_estimated_from_its_beginning(
    tmp_path: Path, chatml: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [write_rows(tmp_path / f"{number}.jsonl", SIZES[number:]) for number in range(4)]
    data = DataSpec(files=tuple(names), pack_tokens=256)
    files = find_files(data.files, None)
    monkeypatch.setattr(epoch_length, "_MOST_RECORDS", 1)
    for most_files, words in ((64, "the first 64 records of each file"), (2, "the first 64 records of 2 files")):
        monkeypatch.setattr(epoch_length, "_MOST_FILES", most_files)
        found = measure_epochs(data, files, chatml, 2)
        assert not found.exact and found.source == f"estimated from {words}"
        assert found.packs == pytest.approx(packs_of_all(names), rel=0.1)


@pytest.mark.parametrize("name", ["a.json", "a.jsonl.gz"])
def test_records_that_wait_in_a_buffer_are_not_forgotten(
    name: str, tmp_path: Path, chatml: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a small file all bytes are read long before the last record."""
    path = Path(write_rows(tmp_path / "a.jsonl", SIZES))
    text = path.read_text()
    if name == "a.json":
        (tmp_path / name).write_text(f"[{','.join(text.splitlines())}]")
    else:
        (tmp_path / name).write_bytes(gzip.compress(text.encode()))
    monkeypatch.setattr(epoch_length, "_MOST_RECORDS", 100)
    data = DataSpec(files=(str(tmp_path / name),), pack_tokens=256)
    found = measure_epochs(data, find_files(data.files, None), chatml, 2)
    assert not found.exact and found.source == "estimated from the first 100 records of each file"
    assert found.packs == pytest.approx(packs_of_all([str(path)]), rel=0.1)


def packs_of_all(names: list[str]) -> float:
    tokens = sum(len(json.loads(line)["input_ids"]) for name in names for line in Path(name).read_text().splitlines())
    return 2 * tokens / 256


def test_nothing_usable(tmp_path: Path, chatml: PreTrainedTokenizerFast) -> None:
    (tmp_path / "a.jsonl").write_text("oops\n")
    data = DataSpec(files=(str(tmp_path / "a.jsonl"),), pack_tokens=256)
    with pytest.raises(SlipstreamError, match="no record is usable among the first 4,096 of each file"):
        measure_epochs(data, find_files(data.files, None), chatml, 1)
