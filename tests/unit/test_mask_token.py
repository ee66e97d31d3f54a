"""A run without a mask is refused before it starts, in the trainer's words, where the target's files say it surely."""

import json
from pathlib import Path
from typing import Any

import pytest

from control_api.run_definition import define_run
from control_api.schemas import RunCreate
from slipstream.cli.main import run_command
from slipstream.errors import SlipstreamError
from slipstream.mask_token import MaskFactsOfFiles, mask_facts, require_mask
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import RunSpec, TargetSpec
from slipstream.target_files import TargetFiles, files_at_hand
from slipstream.target_loading import load_tokenizer
from tests.fakes.gguf_files import gguf_without_weights
from tests.fakes.tiny_tokenizer import STYLES, Style, build_tiny_tokenizer

SIZES = {"num_hidden_layers": 8, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}


def model(directory: Path, style: Style = "chatml", *, spare: int = 0) -> tuple[Path, int]:
    """A directory that says all but weights, and the length of its tokenizer."""
    length = len(build_tiny_tokenizer(directory, style))
    (directory / "config.json").write_text(json.dumps({**SIZES, "vocab_size": length + spare}))
    return directory, length


def spec(target: Path, **drafter: Any) -> RunSpec:
    return RunSpec.model_validate(
        {
            "name": "masked",
            "target": {"model": str(target)},
            "data": {"files": ["/a.jsonl"]},
            "drafter": drafter,
            "train": {"max_steps": 1},
        }
    )


def files_of(directory: Path) -> TargetFiles:
    files = files_at_hand(TargetSpec(model=str(directory)))
    assert files is not None
    return files


@pytest.mark.parametrize("style", STYLES)
def test_files_say_what_the_tokenizer_says(tmp_path: Path, style: Style) -> None:
    tokenizer = build_tiny_tokenizer(tmp_path, style)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 700}}))
    special = {token.content: row for row, token in tokenizer.added_tokens_decoder.items()}
    assert mask_facts(files_of(tmp_path)) == MaskFactsOfFiles(700, len(tokenizer), special)


def test_the_words_are_the_trainers(tmp_path: Path) -> None:
    target, length = model(tmp_path)
    words = f"the target has no mask token and no unused row (tokenizer {length} tokens, vocabulary {length} rows)"
    for drafter, message in (
        ({}, words),
        ({"mask_token": "<nope>"}, "'<nope>', which is no special token of the target (it has: <|endoftext|>, "),
        ({"mask_token_id": length}, f"the mask is row {length}, the target's vocabulary has {length} rows"),
    ):
        with pytest.raises(SlipstreamError) as refused:
            require_mask(spec(target, **drafter))
        assert message in refused.value.message and refused.value.reason is Reason.SPEC_INVALID
    require_mask(spec(target, mask_token="<|im_start|>"))
    require_mask(spec(target, mask_token_id=length - 1))
    others = spec(target)
    require_mask(others.model_copy(update={"drafter": others.drafter.model_copy(update={"architecture": "other"})}))
    require_mask(spec(model(tmp_path, spare=1)[0]))


def test_what_files_do_not_say_surely_is_left_to_the_trainer(tmp_path: Path) -> None:
    target, _ = model(tmp_path / "a")
    settings = json.loads((target / "tokenizer_config.json").read_text())
    (target / "tokenizer_config.json").write_text(json.dumps({**settings, "mask_token": "<|im_start|>"}))
    require_mask(spec(target))
    target, _ = model(tmp_path / "b")
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({"id": 999, "content": "<mask>"})
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    require_mask(spec(target))
    model_and_added = '{"model": {"vocab": [3, [], [[1], 2]]}, "added_tokens": [3, {"id": 1, "content": [2]}]}'
    for content in ("", "[]", "{", '{"model": {"vocab": 3}}', model_and_added):
        (target / "tokenizer.json").write_text(content)
        require_mask(spec(target))
    (target / "tokenizer.json").unlink()
    require_mask(spec(target))
    require_mask(spec(tmp_path / "absent"))
    require_mask(spec(Path("nobody/nothing")))


@pytest.mark.parametrize(
    "named",
    [
        {"pad_token": "<spare>"},
        {"pad_token": {"__type": "AddedToken", "content": "<spare>"}},
        {"additional_special_tokens": ["<spare>"]},
        {"extra_special_tokens": {"image_token": "<spare>"}},
    ],
)
def test_a_token_that_settings_alone_name_is_added_when_the_tokenizer_is_loaded(
    named: dict[str, Any], tmp_path: Path
) -> None:
    target, length = model(tmp_path)
    settings = json.loads((target / "tokenizer_config.json").read_text())
    (target / "tokenizer_config.json").write_text(json.dumps({**settings, **named}))
    loaded = load_tokenizer(TargetSpec(model=str(target)))
    assert len(loaded) == length + 1 and "<spare>" in loaded.get_vocab()
    require_mask(spec(target, mask_token="<spare>"))


def test_a_gguf_file_says_it_too(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_without_weights(tied=True))
    require_mask(spec(path))  # two tokens, many rows
    path.write_bytes(gguf_without_weights(tied=True, vocabulary=2))
    with pytest.raises(SlipstreamError, match=r"tokenizer 2 tokens, vocabulary 2 rows") as refused:
        require_mask(spec(path))
    assert "`slipstream data inspect RECIPE` lists some" in str(refused.value.remedy)
    (tmp_path / "broken.gguf").touch()
    require_mask(spec(tmp_path / "broken.gguf"))
    require_mask(spec(path, mask_token="<nope>"))  # which tokens are special ones is not read
    path.write_bytes(gguf_without_weights(tied=True, vocabulary=2, tokens=("a", "<mask>")))
    require_mask(spec(path))


def test_a_plan_refuses_it(tmp_path: Path) -> None:
    target, _ = model(tmp_path / "model")
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        f'name = "mine"\n[target]\nmodel = "{target}"\n[data]\nfiles = ["a.jsonl"]\n[train]\nmax_steps = 1\n'
    )
    with pytest.raises(SlipstreamError, match="no mask token and no unused row"):
        run_command(["plan", str(recipe), "--memory", "24GiB"])
    assert run_command(["plan", str(recipe), "--memory", "24GiB", "--set", "drafter.mask_token=<|im_start|>"]) == 0


def test_a_control_api_refuses_what_it_may_read(tmp_path: Path) -> None:
    target, _ = model(tmp_path / "model")
    body = RunCreate(spec=spec(target).model_dump(mode="json"))
    for roots in ((), (tmp_path,)):
        with pytest.raises(SlipstreamError, match="no mask token and no unused row"):
            define_run(body.model_copy(update={"spec": {**(body.spec or {}), "data": {"files": ["/a"]}}}), roots)


UNREADABLE = ("~nobody-has-this-home/model", "/models/" + "x" * 5000, "x" * 5000)
"""Another machine's names: nothing that this one can look at."""


@pytest.mark.parametrize("name", UNREADABLE, ids=["no such home", "a long path", "a long name"])
def test_a_model_that_cannot_be_looked_at_here_is_left_to_the_trainer(name: str) -> None:
    require_mask(spec(Path(name)))
    body = RunCreate(spec=spec(Path(name)).model_dump(mode="json"))
    for roots in ((), (Path("/"),)):
        assert define_run(body, roots).target.model == name


def test_so_is_one_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, _ = model(tmp_path)

    def refused(_path: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "exists", refused)
    require_mask(spec(target))
