"""Files become a data set: allowed paths, splits, the account, and errors with a remedy."""

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import DataSpec
from slipstream.wire.data_report import DataReport, Finding, FindingCount
from target_server import dataset, document_index
from target_server.data_files import file_stamp, find_files
from target_server.dataset import Dataset, load_documents
from target_server.record_encoder import id_hash, is_heldout
from target_server.tokens_and_mask import ChatEncoder


def write_talks(path: Path, numbers: range, **extra: Any) -> Path:
    lines = [
        {"id": f"{path.stem}-{n}", "messages": [
            {"role": "user", "content": f"Question {n}?"}, {"role": "assistant", "content": f"Answer {n}."},
        ], **extra}
        for n in numbers
    ]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def load(*paths: Path, tokenizers: dict, split: str = "train", roots: list[Path] | None = None, **spec: Any) -> Dataset:
    data = DataSpec(files=tuple(str(path) for path in paths), **{"pack_tokens": 256, **spec})
    files = find_files(data.files, roots)
    return load_documents(data, tokenizers["chatml"], files=files, split=split)


def test_files_in_order_with_an_account_of_every_line(tmp_path: Path, tokenizers: dict) -> None:
    first = write_talks(tmp_path / "a.jsonl", range(3))
    second = tmp_path / "b.jsonl"
    second.write_text("oops\n" + write_talks(tmp_path / "c.jsonl", range(2)).read_text())
    result = load(first, second, tokenizers=tokenizers)
    report = result.report
    assert list(result.documents.ids) == ["a-0", "a-1", "a-2", "c-0", "c-1"]
    assert (report.read, report.used, report.num_dropped, report.other_split) == (6, 5, 1, 0)
    assert (report.documents, report.tokens) == (5, result.documents.num_tokens)
    assert report.supervised_tokens == sum(document.loss_mask.sum() for document in result.documents)
    assert report.mask_samples == 5
    assert DataReport.model_validate_json(report.model_dump_json()) == report
    lines = report.summary_lines()
    assert lines[0] == "6 conversations read: 5 used for train, 0 in the other split, 1 dropped"
    assert "dropped 1: the line is not valid JSON (b.jsonl:1)" in lines


def test_every_finding_has_words() -> None:
    for finding in Finding:
        words = FindingCount(finding=finding, count=9, examples=("f.jsonl:3",)).in_words()
        assert words.startswith("9: ") and words.endswith("(f.jsonl:3, …)")


def test_splits_are_disjoint_complete_and_by_id_alone(tmp_path: Path, tokenizers: dict) -> None:
    path = write_talks(tmp_path / "a.jsonl", range(200))
    train = load(path, tokenizers=tokenizers, heldout_fraction=0.25)
    heldout = load(path, tokenizers=tokenizers, heldout_fraction=0.25, split="heldout", seed=5)
    assert set(train.documents.ids).isdisjoint(heldout.documents.ids)
    assert len(train.documents) + len(heldout.documents) == 200
    assert 25 <= len(heldout.documents) <= 75
    assert train.report.other_split == heldout.report.used
    assert all(is_heldout(id_hash(name), 0.25) for name in heldout.documents.ids)
    # A larger fraction only adds to the held-out documents.
    assert all(is_heldout(id_hash(name), 0.4) for name in heldout.documents.ids)
    first_eight_bytes = hashlib.sha256(b"a-0").hexdigest()[:16]
    assert is_heldout(id_hash("a-0"), 0.25) == (int(first_eight_bytes, 16) / 2**64 < 0.25)


def test_the_content_hash_covers_names_bytes_order_and_format(tmp_path: Path, tokenizers: dict) -> None:
    a, b = write_talks(tmp_path / "a.jsonl", range(2)), write_talks(tmp_path / "b.jsonl", range(2))
    hashes = [
        load(a, b, tokenizers=tokenizers).content_hash,
        load(b, a, tokenizers=tokenizers).content_hash,
        load(a, tokenizers=tokenizers).content_hash,
        load(a, b, tokenizers=tokenizers, format="openai").content_hash,
        load(a, b, tokenizers=tokenizers, train_turns="last").content_hash,
    ]
    assert load(a, b, tokenizers=tokenizers, pack_tokens=512).content_hash == hashes[0]
    moved, renamed = tmp_path / "elsewhere" / "a.jsonl", tmp_path / "renamed.jsonl"
    moved.parent.mkdir()
    for path in (moved, renamed):
        path.write_bytes(a.read_bytes())
    assert load(moved, b, tokenizers=tokenizers).content_hash == hashes[0]
    hashes.append(load(renamed, b, tokenizers=tokenizers).content_hash)
    a.write_text(a.read_text() + "\n")
    hashes.append(load(a, b, tokenizers=tokenizers).content_hash)
    assert len(set(hashes)) == len(hashes)


def test_documents_are_cut_to_the_limit(tmp_path: Path, tokenizers: dict) -> None:
    path = tmp_path / "long.jsonl"
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "word " * 400}]
    path.write_text(json.dumps({"messages": turns}) + "\n")
    for limit, spec in ((256, {}), (100, {"max_document_tokens": 100})):
        result = load(path, tokenizers=tokenizers, **spec)
        assert result.documents.lengths.tolist() == [limit]
        assert result.report.count(Finding.TRUNCATED) == 1
        assert any("cut to the token limit (long.jsonl:1)" in line for line in result.report.summary_lines())


def refused(reason: Reason, *paths: Path, **arguments: Any) -> SlipstreamError:
    with pytest.raises(SlipstreamError) as caught:
        load(*paths, **arguments)
    assert caught.value.reason is reason and caught.value.remedy
    return caught.value


def test_missing_files_and_directories_are_refused(tmp_path: Path, tokenizers: dict) -> None:
    error = refused(Reason.DATA_INVALID, tmp_path / "none.jsonl", tokenizers=tokenizers)
    assert "none.jsonl does not exist" in error.message
    error = refused(Reason.DATA_INVALID, tmp_path, tokenizers=tokenizers)
    assert "holds no data file" in error.message


@pytest.mark.parametrize("content", ["", "\n\n", "[]\n", '{"messages": []}\n'])
def test_a_file_without_usable_conversation_is_named(tmp_path: Path, tokenizers: dict, content: str) -> None:
    good, bad = write_talks(tmp_path / "good.jsonl", range(2)), tmp_path / "bad.jsonl"
    bad.write_text(content)
    for files in ((good, bad), (bad, good)):
        report = load(*files, tokenizers=tokenizers).report
        assert (report.used, report.count(Finding.FILE_GAVE_NOTHING)) == (2, 1)
        assert "note 1: no usable conversation in the whole file (bad.jsonl)" in report.summary_lines()
    error = refused(Reason.DATA_INVALID, bad, tokenizers=tokenizers)
    assert "bad.jsonl: no usable conversation" in error.message
    assert ("bad.jsonl:1" in error.message) == bool(content.strip())


def test_paths_outside_the_roots_are_refused_whether_they_exist_or_not(tmp_path: Path, tokenizers: dict) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    allowed, secret = write_talks(inside / "a.jsonl", range(2)), write_talks(outside / "b.jsonl", range(2))
    link = inside / "link.jsonl"
    link.symlink_to(secret)
    assert len(load(allowed, tokenizers=tokenizers, roots=[outside, inside]).documents) == 2
    for path in (secret, link, inside / ".." / "outside" / "b.jsonl", outside / "none.jsonl"):
        error = refused(Reason.PATH_NOT_ALLOWED, path, tokenizers=tokenizers, roots=[inside])
        assert "--data-root" in error.remedy
    refused(Reason.PATH_NOT_ALLOWED, allowed, tokenizers=tokenizers, roots=[])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("~nobody-of-that-name/x", "is not the path of a file"),
        ("a\0b", "is not the path of a file"),
        ("x" * 5000, "cannot be read: File name too long"),
    ],
)
def test_names_that_no_file_can_have(tmp_path: Path, name: str, words: str) -> None:
    for roots, reason in ((None, Reason.DATA_INVALID), ([tmp_path], Reason.PATH_NOT_ALLOWED)):
        with pytest.raises(SlipstreamError) as caught:
            find_files([name], roots)
        assert caught.value.reason is reason
        assert (words in caught.value.message) == (roots is None)


@pytest.mark.parametrize("call", ["is_file", "stat"])
def test_a_file_that_may_not_be_looked_at(
    tmp_path: Path, tokenizers: dict, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = write_talks(tmp_path / "a.jsonl", range(2))

    def denied(_self: Path, **_options: object) -> None:
        raise PermissionError(13, "Permission denied")

    if call == "stat":
        with monkeypatch.context() as patch, pytest.raises(SlipstreamError, match="Permission denied") as caught:
            patch.setattr(Path, call, denied)
            file_stamp(path)
        assert caught.value.reason is Reason.DATA_INVALID
    else:
        monkeypatch.setattr(Path, call, denied)
        assert "Permission denied" in refused(Reason.DATA_INVALID, path, tokenizers=tokenizers).message


def test_an_empty_split_is_refused(tmp_path: Path, tokenizers: dict) -> None:
    path = write_talks(tmp_path / "a.jsonl", range(3))
    error = refused(Reason.DATA_INVALID, path, tokenizers=tokenizers, split="heldout")
    assert "heldout_fraction is 0" in error.message


def _claim_problem(self: ChatEncoder, row: object, ids: object, mask: object) -> str:
    return "the supervised tokens say something else"


def test_wrong_masks_are_noted_and_refused_when_they_are_the_rule(
    tmp_path: Path, tokenizers: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChatEncoder, "row_problem", _claim_problem)
    few = load(write_talks(tmp_path / "few.jsonl", range(2)), tokenizers=tokenizers)
    assert few.report.count(Finding.MASK_NOT_VERIFIED) == few.report.mask_samples == 2
    refused(Reason.MODEL_INVALID, write_talks(tmp_path / "a.jsonl", range(8)), tokenizers=tokenizers)


def test_a_file_that_grows_while_it_is_read_is_refused(
    tmp_path: Path, tokenizers: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_talks(tmp_path / "a.jsonl", range(3))

    def append_meanwhile(self: ChatEncoder, row: object, ids: object, mask: object) -> None:
        with path.open("a") as file:
            file.write("{}\n")

    monkeypatch.setattr(ChatEncoder, "row_problem", append_meanwhile)
    error = refused(Reason.DATA_INVALID, path, tokenizers=tokenizers)
    assert "changed while it was read" in error.message


def test_an_unreadable_file_is_refused(tmp_path: Path, tokenizers: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_talks(tmp_path / "a.jsonl", range(3))

    def deny(self: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", deny)  # the tests may run as root, whom no mode keeps out
    error = refused(Reason.DATA_INVALID, path, tokenizers=tokenizers)
    assert "a.jsonl cannot be read: Permission denied" in error.message


def test_progress_is_logged(
    tmp_path: Path, tokenizers: dict, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(document_index, "_PROGRESS_SECONDS", 0.0)
    with caplog.at_level(logging.INFO):
        load(write_talks(tmp_path / "a.jsonl", range(3)), tokenizers=tokenizers)
    events = [record.getMessage() for record in caplog.records]
    assert events.count("building_index") == 1 and events[-1] == "documents_loaded"


@pytest.mark.parametrize(("gib", "jobs"), [(0.1, 1), (1, 8), (30, 8), (100, 3), (1000, 1)])
def test_an_index_is_built_by_as_many_processes_as_two_gib_have_room_for(
    monkeypatch: pytest.MonkeyPatch, gib: float, jobs: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _process: range(64))
    assert dataset._jobs(int(gib * 2**30)) == jobs
