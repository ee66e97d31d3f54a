"""What heartbeats take from a run's directory, and what is no reason to stop."""

import json
from pathlib import Path

import pytest

from control_api.trainer_schemas import ReportedCheckpoint
from drafter_trainer.agent.run_files import MAX_LINES, RunFiles, as_records, printable
from tests.fakes.control_plane import record


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    (tmp_path / "logs").mkdir()
    return RunFiles(tmp_path, attempt=2)


def write_metrics(files: RunFiles, *lines: str) -> None:
    (files.directory / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))


def save_checkpoint(files: RunFiles, step: int, incarnation: int = 1) -> Path:
    directory = files.directory / "checkpoints" / f"step-{step:08d}"
    directory.mkdir(parents=True)
    (directory / "state.json").write_text(json.dumps({"incarnation": incarnation, "cursor": {"next_step": step}}))
    (directory / "manifest.json").write_text("{}")
    return directory


def test_metrics_in_parts(files: RunFiles) -> None:
    write_metrics(files, *(json.dumps(record(step)) for step in range(MAX_LINES + 5)))
    first = files.metrics(0)
    assert (len(first.records), first.reach_end) == (MAX_LINES, False)
    rest = files.metrics(MAX_LINES)
    assert ([one["step"] for one in rest.records], rest.reach_end) == (list(range(MAX_LINES, MAX_LINES + 5)), True)
    assert files.steps_trained() == MAX_LINES + 5


@pytest.mark.parametrize(
    "line",
    [
        "",
        "no JSON",
        '{"step": 1, "incarn',
        "[1, 2]",
        "{}",
        '{"step": true, "incarnation": 1}',
        '{"step": -1, "incarnation": 1}',
        '{"step": 1, "incarnation": 1.5}',
        '{"step": 1, "incarnation": 9007199254740992}',
        '{"step": 1, "incarnation": 1, "loss": NaN}',
        '{"step": 1, "incarnation": 1, "loss": 1e999}',
        '{"step": 1, "incarnation": 1, "name": "\\ud800"}',
        '{"step": 1, "incarnation": 1, "deep": ' + "[" * 21 + "]" * 21 + "}",
        "[" * 100_000,
    ],
)
def test_a_line_that_is_no_record_is_sent_as_its_neighbour(line: str) -> None:
    good = [json.dumps(record(step)).encode() for step in (3, 4)]
    assert [one["step"] for one in as_records([good[0], line.encode(), good[1]])] == [3, 3, 4]
    assert [one["step"] for one in as_records([line.encode(), *good])] == [3, 3, 4]
    assert as_records([line.encode()]) == [{"step": 0, "incarnation": 0}]


def test_a_broken_last_line_says_nothing_of_progress(files: RunFiles) -> None:
    assert files.steps_trained() is None
    write_metrics(files, json.dumps(record(3)), "broken")
    assert files.steps_trained() is None


def test_log_lines_are_what_a_terminal_shows() -> None:
    assert printable(b"plain \xc3\xa9\ttext") == "plain \u00e9\ttext"
    assert printable(b"10%\r50%\r100%") == "100%"
    assert printable(b"windows\r") == "windows"
    assert printable(b"\x1b[31mred\x00\xff") == "\u241b[31mred\u2400\ufffd"
    assert len(printable(b"x" * 5000)) == 2000


def test_the_tail_of_the_log(files: RunFiles) -> None:
    assert files.log_tail() == []
    files.log.write_bytes(b"".join(b"line %d\n" % number for number in range(100)) + b"y" * 900)
    tail = files.log_tail()
    assert (len(tail), tail[0], len(tail[-1])) == (40, "line 61", 500)


def test_checkpoints_are_the_complete_ones(files: RunFiles) -> None:
    assert files.checkpoints() == [] and files.newest_checkpoint() is None
    kept = save_checkpoint(files, 10, incarnation=2)
    save_checkpoint(files, 30, incarnation=1)
    (save_checkpoint(files, 40) / "manifest.json").unlink()
    (save_checkpoint(files, 50) / "state.json").write_text("torn")
    (kept.parent / ".unfinished-step-00000060").mkdir()
    (kept.parent / "latest").symlink_to(kept.name)
    assert [(one["step"], one["incarnation"]) for one in files.checkpoints()] == [(10, 2), (30, 1)]
    assert files.checkpoints()[0]["path"] == str(kept)
    assert files.newest_checkpoint() == (2, 10)


def test_a_checkpoint_too_far_down_is_named_alone(tmp_path: Path) -> None:
    deep = tmp_path / ("a" * 200) / ("b" * 200)
    deep.mkdir(parents=True)
    files = RunFiles(deep, attempt=1)
    save_checkpoint(files, 7)
    assert files.checkpoints()[0]["path"] == "step-00000007"


def measure(directory: Path, heldout: object) -> None:
    path = directory / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"heldout": heldout}))


def test_what_was_measured_on_held_out_answers(files: RunFiles) -> None:
    measured = {"accepted_length": 1.285, "by_source": {"chat": 1.3, "code": 1.315}}
    older = save_checkpoint(files, 10)
    measure(older, measured | {"answers": "digest"})
    measure(save_checkpoint(files, 20), None)
    (older.parent / "best").symlink_to(older.name)
    found = [(one["step"], one["heldout"], one["is_best"]) for one in files.checkpoints()]
    assert found == [(10, measured, True), (20, None, False)]
    assert files.checkpoints()[1]["heldout"] is None


@pytest.mark.parametrize(
    ("heldout", "sent"),
    [
        (7, None),
        ({"accepted_length": "1"}, None),
        ({"accepted_length": 1e9, "by_source": {}}, None),
        ({"accepted_length": 1.5, "by_source": {"a": None, "b": -1, "c": True, "d": 2}}, {"d": 2}),
        ({"accepted_length": 1.5, "by_source": {"\ud800": 2}}, {}),
        ({"accepted_length": 1.5, "by_source": {"x" * 200_000: 2}}, {}),
        ({"accepted_length": 1.5}, {}),
    ],
)
def test_only_what_the_control_api_takes_is_sent(files: RunFiles, heldout: object, sent: object) -> None:
    measure(save_checkpoint(files, 10), heldout)
    (one,) = files.checkpoints()
    assert one["heldout"] == (None if sent is None else {"accepted_length": 1.5, "by_source": sent})
    assert ReportedCheckpoint.model_validate_json(json.dumps(one)).step == 10
