"""What the demo decides before it starts anything, and what it says at the end."""

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.child_processes import one_gpu, visible_gpu
from slipstream.cli.commands.demo import MARKER, STACK, choose_directory, prepare_directory
from slipstream.cli.demo_report import DemoResult, print_summary, summarise, write_summary
from slipstream.errors import SlipstreamError
from slipstream.packaged_model import given_model
from slipstream.run_spec.reasons import Reason


def refused(directory: Path) -> str:
    with pytest.raises(SlipstreamError) as caught:
        prepare_directory(directory)
    assert caught.value.reason is Reason.PATH_NOT_ALLOWED and caught.value.remedy
    return caught.value.message


def test_a_new_and_an_empty_directory_are_marked(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for directory in (tmp_path / "new" / "deep", tmp_path / "empty"):
        prepare_directory(directory)
        assert [entry.name for entry in directory.iterdir()] == [MARKER]


def test_an_earlier_demo_is_emptied_and_what_it_links_to_stays(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    directory = tmp_path / "demo"
    prepare_directory(directory)
    (directory / "run" / "checkpoints").mkdir(parents=True)
    (directory / "summary.json").write_text("{}")
    (directory / "link").symlink_to(precious)
    prepare_directory(directory)
    assert [entry.name for entry in directory.iterdir()] == [MARKER]
    assert (precious / "file").exists()


def test_a_drafter_of_an_earlier_demo_stays(tmp_path: Path) -> None:
    wanted = tmp_path / "demo"
    assert choose_directory(wanted) == wanted, "nothing is there"
    prepare_directory(wanted)
    assert choose_directory(wanted) == wanted, "a demo that was broken off before it had saved anything"
    (wanted / STACK / "runs" / "demo" / "checkpoints" / "step-00000008").mkdir(parents=True)
    assert choose_directory(wanted) == tmp_path / "demo-2"
    (tmp_path / "demo-2").mkdir()
    (tmp_path / "demo-2" / "thesis.tex").write_text("years of work")
    (tmp_path / "demo-3").write_text("a file")
    assert choose_directory(wanted) == tmp_path / "demo-4"
    prepare_directory(tmp_path / "demo-4")
    assert choose_directory(wanted) == tmp_path / "demo-4"
    assert choose_directory(tmp_path / "demo-4") == tmp_path / "demo-4"


@pytest.mark.parametrize("length", [254, 300])
def test_a_name_that_is_too_long_is_refused_in_words(tmp_path: Path, length: int) -> None:
    """The shorter one has room for a demo, but not for one beside it."""
    wanted = tmp_path / ("d" * length)
    if length < 256:
        prepare_directory(wanted)
        (wanted / STACK / "runs" / "demo" / "checkpoints" / "step-00000002").mkdir(parents=True)
    with pytest.raises(SlipstreamError, match="cannot be used: File name too long") as refused:
        choose_directory(wanted)
    assert refused.value.reason is Reason.PATH_NOT_ALLOWED


def test_a_foreign_directory_with_logs_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "thesis.tex").write_text("years of work")
    assert MARKER in refused(tmp_path)
    assert {entry.name for entry in tmp_path.iterdir()} == {"logs", "thesis.tex"}


def test_a_file_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "demo").write_text("a file")
    assert "not a directory" in refused(tmp_path / "demo")
    assert "cannot be written" in refused(tmp_path / "demo" / "inside")


def test_a_model_that_exists_here_is_meant_as_it_stands_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "blob").write_bytes(b"")
    (tmp_path / "x.gguf").symlink_to(tmp_path / "blob")
    assert given_model("./x.gguf") == str(tmp_path / "x.gguf")
    assert given_model("owner/name") == "owner/name"


@pytest.mark.parametrize(("visible", "first"), [(None, "0"), ("3,1", "3"), ("GPU-abc, 1", "GPU-abc"), ("", "")])
def test_children_see_one_gpu(monkeypatch: pytest.MonkeyPatch, visible: str | None, first: str) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert one_gpu() == {"CUDA_VISIBLE_DEVICES": first}


@pytest.mark.parametrize(("visible", "second"), [(None, "1"), ("4, 6", "6"), ("4", ""), ("", "")])
def test_gpus_are_counted_among_the_visible_ones(visible: str | None, second: str) -> None:
    assert visible_gpu(1, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == second


def evaluation(accepted: float | None, ratio: float | None) -> dict[str, Any]:
    row = {"accepted_length": accepted, "speed_ratio_to_plain": ratio}
    return {"results": {"untrained": {"all": row}, "trained": {"all": row}}, "lossless": True}


@pytest.mark.parametrize(
    ("losses", "accepted", "said"),
    [([3.0, None, 1.0], 1.5, "1.50 tokens"), ([None], None, "too short")],
)
def test_a_summary_has_numbers_or_null(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    losses: list[float | None],
    accepted: float | None,
    said: str,
) -> None:
    records = [{"step": step, "loss": loss, "tokens": 128 * (step + 1)} for step, loss in enumerate(losses)]
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    found = evaluation(accepted, accepted)
    result = DemoResult(
        model="SmolLM2-135M-Instruct.Q4_1.gguf",
        device="CPU, 2 cores",
        metrics=metrics,
        objective={"cross_entropy": 1.0},
        evaluation=found,
        dashboard="http://127.0.0.1:1/dashboard/",
        seconds=12.34,
    )
    summary = summarise(result)
    write_summary(tmp_path / "summary.json", summary)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    mean = 2.0 if accepted else None
    assert summary["loss"] == {"first": mean, "last": mean}
    assert summary["accepted_length"] == {"before": accepted, "after": accepted}
    assert (summary["steps"], summary["tokens"]) == (len(losses), 128 * len(losses))
    monkeypatch.setenv("COLUMNS", "80")
    print_summary(summary, found, tmp_path / "summary.json")
    printed = capsys.readouterr().out
    assert said in printed
    assert printed.splitlines()[0] == "A drafter for SmolLM2-135M-Instruct.Q4_1.gguf on CPU, 2 cores", "in one line"
    assert "The loss is the cross-entropy of a drafted token in nats" in printed
    print_summary(summary | {"objective": {"kl": 0.5, "tv": 0.5}}, found, tmp_path / "summary.json")
    assert "The loss is a weighted mean of kl and tv over the drafted tokens" in capsys.readouterr().out
