"""What is said before a run: a mask token that is missing, and what takes long."""

import json
import re
import threading
from pathlib import Path

import pytest

from slipstream.errors import SlipstreamError
from slipstream.mask_token import vocabulary_rows
from slipstream.run_spec.spec import DrafterSpec, TargetSpec
from slipstream.target_files import locate_tokenizer
from target_server.data_command import read_sources, said_when_slow
from target_server.mask_remark import mask_remark
from tests.fakes.tiny_tokenizer import build_tiny_tokenizer


@pytest.mark.parametrize(
    ("drafter", "spare_rows", "says"),
    [
        ({}, 0, "a run fails: the target has no mask token and no unused row"),
        ({}, None, "unless the model's vocabulary has a row to spare, a run fails"),
        ({}, 64, None),
        ({"mask_token": "<mask>"}, None, "a run fails: drafter.mask_token is '<mask>'"),
        ({"mask_token_id": 3}, 0, None),
        ({"mask_token_id": 10_000}, None, None),
        ({"mask_token_id": 10_000}, 0, "the mask is row 10000, the target's vocabulary has"),
        ({"mask_token": "<|im_start|>"}, 0, None),
        (
            {"mask_token": "<mask>"},
            64,
            "a run fails: drafter.mask_token is '<mask>', which is no special token of the target",
        ),
    ],
)
def test_a_missing_mask_token(
    tmp_path: Path, drafter: dict[str, object], spare_rows: int | None, says: str | None
) -> None:
    tokenizer = build_tiny_tokenizer(tmp_path)
    rows = None if spare_rows is None else len(tokenizer) + spare_rows
    remark = mask_remark(DrafterSpec.model_validate(drafter), tokenizer, rows)
    assert remark is None if says is None else remark is not None and says in remark


@pytest.mark.parametrize(
    ("config", "rows"),
    [({"vocab_size": 9}, 9), ({"text_config": {"vocab_size": 8}}, 8), ({}, None), ([], None), (None, None)],
)
def test_rows_of_the_vocabulary(tmp_path: Path, config: object, rows: int | None) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert vocabulary_rows(tmp_path) == rows


@pytest.mark.parametrize(
    ("sources", "overrides", "words"),
    [
        (("a.jsonl",), ["train.max_steps=1"], "Of files alone, only data.… and target.… can be set, not train."),
        (("a.jsonl",), ["target=3"], "target: found 3 (integer), expected a table"),
        (("r.toml", "a.jsonl"), [], "r.toml is a recipe, which names its data itself; given with it: 1 other file."),
    ],
)
def test_sources_that_do_not_go_together(sources: tuple[str, ...], overrides: list[str], words: str) -> None:
    with pytest.raises(SlipstreamError, match=re.escape(words)):
        read_sources(sources, None, overrides)


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match=r"has no tokenizer: none of tokenizer\.json, "):
        locate_tokenizer(TargetSpec(model=str(tmp_path)))
    (tmp_path / "model.gguf").touch()
    with pytest.raises(SlipstreamError) as refused:
        locate_tokenizer(TargetSpec(model=str(tmp_path)))
    assert refused.value.remedy == f"Name the file itself: {tmp_path / 'model.gguf'}"


def test_what_takes_long_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    said = threading.Event()

    class Heard:
        def write(self, text: str) -> None:
            assert text == "reading …\n"
            said.set()

    with monkeypatch.context() as patched:
        patched.setattr("sys.stderr", Heard())
        with said_when_slow("reading …", seconds=0.0):
            assert said.wait(60)
    with said_when_slow("too early", seconds=3600):
        pass
    assert capsys.readouterr().err == ""
