"""Answers are those of their prompts, whatever is decoded beside them and in whichever order; how many at once."""

import itertools
import json
import logging
import re
import threading
from pathlib import Path

import pytest

from slipstream.answers_settings import settings_beside
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import TargetSpec
from slipstream.target_loading import LoadedTarget, load_causal_lm
from slipstream.wire.data_report import ReportBuilder
from target_server import answering_progress
from target_server.answering_progress import AnsweringProgress
from target_server.answers_file import BATCH_ON_CPU, BATCH_ON_GPU, check_settings, default_batch, require_writable
from target_server.cli import run_command
from target_server.regeneration import Asked, Regenerator, Sampling, answer_prompts
from tests.fakes.served_model import write_tiny_target

WHOSE = {"target": "tiny", "target_fingerprint": "f"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedTarget:
    directory = write_tiny_target(tmp_path_factory.mktemp("target"))
    return load_causal_lm(TargetSpec(model=str(directory), dtype="float32"), "cpu")


def test_sorted_by_length_every_prompt_keeps_its_answer(target: LoadedTarget) -> None:
    lengths = [9, 2, 31, 4, 17, 2, 25, 8, 3, 12, 40]
    asked = [Asked(f"p{number}", [7 + number, *range(3, 2 + length)]) for number, length in enumerate(lengths)]
    alone = Regenerator(target, Sampling(16, batch=1))
    expected = [alone.answer([prompt], number)[0] for number, prompt in enumerate(asked)]
    assert len({tuple(answer.token_ids) for answer in expected}) > 1, "else this test shows nothing"
    sizes: list[list[int]] = []
    together = Regenerator(target, Sampling(16, batch=4))
    generate = together._generate

    def seen(prompts: list[list[int]]) -> object:
        sizes.append([len(prompt) for prompt in prompts])
        return generate(prompts)

    together._generate = seen  # type: ignore[method-assign,assignment]
    assert together.answer(asked, 0) == expected
    assert sizes == [[2, 2, 3, 4], [8, 9, 12, 17], [25, 31, 40]]


def test_how_many_at_once(tmp_path: Path) -> None:
    output = tmp_path / "answers.jsonl"
    beside = tmp_path / "answers.jsonl.settings.json"
    assert [default_batch(output, device) for device in ("cpu", "cuda", "cuda:1")] == [
        BATCH_ON_CPU,
        BATCH_ON_GPU,
        BATCH_ON_GPU,
    ]
    beside.write_text(json.dumps({"batch": 7}))
    assert default_batch(output, "cuda") == BATCH_ON_GPU, "of a file that is gone"
    output.touch()
    assert default_batch(output, "cuda") == BATCH_ON_GPU, "nothing was answered"
    output.write_text("{}\n")
    assert default_batch(output, "cuda") == 7, "a file is gone on with as it was begun"
    for broken in ("", "[]", "{}", '{"batch": "x"}'):
        beside.write_text(broken)
        assert default_batch(output, "cpu") == BATCH_ON_CPU


def test_where_answers_cannot_go_is_said_before_a_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine\n")
    for output, words, reason in (
        (tmp_path, "it is a directory", Reason.SPEC_INVALID),
        (tmp_path / "file" / "answers.jsonl", "cannot be written to", Reason.SPEC_INVALID),
        (tmp_path / "file", "is there already, and holds no answers", Reason.DATA_INVALID),
    ):
        with pytest.raises(SlipstreamError, match=words) as refused:
            require_writable(output)
        assert refused.value.reason is reason
    (tmp_path / "file.settings.json").write_text("{}")
    require_writable(tmp_path / "file")
    require_writable(tmp_path / "deep" / "er" / "answers.jsonl")
    assert (tmp_path / "deep" / "er").is_dir()


def test_a_file_without_an_answer_is_not_begun(target: LoadedTarget, tmp_path: Path) -> None:
    output = tmp_path / "answers.jsonl"
    for data in ("nothing", "something"):
        asked = [] if data == "nothing" else [Asked("p", [3, 5])]
        answering = Regenerator(target, Sampling(4))
        answer_prompts(answering, iter(asked), output, {**WHOSE, "data": data}, ReportBuilder(), len(asked))
    assert len(output.read_text().splitlines()) == 1
    assert json.loads((tmp_path / "answers.jsonl.settings.json").read_text())["data"] == "something"


def test_a_disk_that_is_full_before_the_first_answer_ends_in_words(tmp_path: Path) -> None:
    output = tmp_path / "answers.jsonl"
    settings_beside(output).symlink_to("/dev/full")
    with pytest.raises(SlipstreamError, match=r"settings\.json cannot be written: No space left") as caught:
        check_settings(output, WHOSE)
    assert caught.value.reason is Reason.DISK_FULL and "start again" in caught.value.remedy


def test_how_far_it_is_is_said_within_a_batch_and_behind_it(
    target: LoadedTarget, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token takes a second here: a batch of 24 lasts longer than the ten after which something is said."""
    # Who looks from outside would turn the clock as well, whenever this machine lets it.
    monkeypatch.setattr(answering_progress, "_LOOK_SECONDS", 3600.0)
    seconds = itertools.count()
    answering = Regenerator(target, Sampling(24, batch=2), ends=frozenset())
    answering.progress = AnsweringProgress(clock=lambda: float(next(seconds)))
    caplog.set_level(logging.INFO)
    asked = [Asked(f"p{number}", [7 + number, 3, 4]) for number in range(6)]
    answer_prompts(answering, iter(asked), tmp_path / "answers.jsonl", WHOSE, ReportBuilder(), len(asked))
    said = [vars(one)["slipstream_fields"] for one in caplog.records if one.getMessage() == "answering"][1:]
    assert {one["prompts"] for one in said} >= {"0/6", "2/6", "4/6"}, "in every batch"
    assert all(one["tokens_per_second"] > 0 for one in said), "of the batch under way as well"
    known = [one["seconds_left"] for one in said if one["prompts"] != "0/6"]
    assert said[0]["seconds_left"] is None and known[0] > known[-1]
    (end,) = [vars(one)["slipstream_fields"] for one in caplog.records if one.getMessage() == "answered"]
    assert (end["prompts"], end["seconds_left"]) == ("6/6", 0)


def test_how_far_it_is_is_said_while_no_token_comes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of long prompts is read for minutes before its first token."""
    monkeypatch.setattr(answering_progress, "_LOOK_SECONDS", 0.01)
    seconds = itertools.count(step=20)
    progress = AnsweringProgress(clock=lambda: float(next(seconds)))
    heard = threading.Event()
    handler = logging.Handler()
    handler.emit = lambda _record: heard.set()  # type: ignore[method-assign]
    logger = logging.getLogger("target_server.answering_progress")
    caplog.set_level(logging.INFO)
    logger.addHandler(handler)
    try:
        with progress.watched():
            assert heard.wait(60)
    finally:
        logger.removeHandler(handler)
    assert "answering-progress" not in {one.name for one in threading.enumerate()}


def test_what_a_token_has_said_is_not_said_from_outside(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    progress = AnsweringProgress(clock=lambda: now[0])
    caplog.set_level(logging.INFO)
    for moment, lines in ((9.0, 0), (10.5, 1), (20.0, 1), (22.5, 2)):
        now[0] = moment
        if moment == 10.5:
            progress.token_done(lambda: 7)
        progress.look()
        assert len(caplog.records) == lines, moment


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--device", "gpu"), "--device names 'gpu'."),
        (("--device", "cuda:99"), "--device names cuda:99, but torch sees"),
        (("--temperature", "nan"), "No text is drawn with temperature nan"),
        (("--temperature", "inf"), "No text is drawn with temperature inf"),
    ],
)
def test_flags_that_mean_nothing(tmp_path: Path, flags: tuple[str, str], words: str) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "Hi"}\n')
    places = ("--to", str(tmp_path / "to.jsonl"), "--report", str(tmp_path / "report.json"))
    with pytest.raises(SlipstreamError, match=re.escape(words)):
        run_command(["regenerate", str(data), "--model", "nobody/nothing", *places, *flags])
