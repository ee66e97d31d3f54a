"""Recipes and overrides: what is accepted, what is refused and in which words, where each value came from."""

from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import pytest
from pydantic import BaseModel

from slipstream.errors import SlipstreamError
from slipstream.run_spec import problems
from slipstream.run_spec.load import LoadedSpec, SpecInvalidError, canonical_json, describe, load_recipe
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import DataSpec, RunSpec

RECIPE = """\
name = "first"

[target]
model = "HuggingFaceTB/SmolLM2-135M-Instruct"

[data]
files = [
    "a.jsonl",  # resolved against this file's directory
    "/data/b.jsonl.gz",
]

[train]
max_steps = 10
seed = 3
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


def refused(path: Path, *overrides: str) -> SlipstreamError:
    with pytest.raises(SlipstreamError) as caught:
        load_recipe(path, overrides)
    assert caught.value.reason is Reason.SPEC_INVALID
    assert caught.value.remedy
    return caught.value


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    return path


def test_values_know_where_they_came_from(recipe: Path) -> None:
    loaded = load_recipe(recipe, ["train.max_steps=100", "optimizer.learning_rate=1e-3"])
    assert loaded.spec.train.max_steps == 100
    assert loaded.spec.optimizer.learning_rate == 1e-3
    assert loaded.origins["train.max_steps"] == "override"
    assert loaded.origins["optimizer.learning_rate"] == "override"
    assert loaded.origins["name"] == "recipe.toml:1"
    assert loaded.origins["data.files"] == "recipe.toml:7"
    assert loaded.origins["train.seed"] == "recipe.toml:14"
    assert loaded.origins["drafter.block_size"] == "default"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.max_steps=7", 7),
        ("train.max_steps = 1_000", 1000),
        ("train.max_steps=5 # five", 5),
    ],
)
def test_override_values_are_toml(recipe: Path, override: str, expected: int) -> None:
    assert load_recipe(recipe, [override]).spec.train.max_steps == expected


def test_later_overrides_win_and_bare_words_are_strings(recipe: Path) -> None:
    spec = load_recipe(recipe, ["train.device=cuda", "train.device=cpu", "train.attention=sdpa"]).spec
    assert (spec.train.device, spec.train.attention) == ("cpu", "sdpa")


def test_override_of_a_whole_table_replaces_it(recipe: Path) -> None:
    loaded = load_recipe(recipe, ["train={epochs=2}"])
    assert (loaded.spec.train.max_steps, loaded.spec.train.epochs) == (None, 2)
    assert loaded.origins["train.epochs"] == "override"
    assert loaded.origins["train.max_steps"] == "default"
    assert loaded.origins["train.seed"] == "default"


def test_empty_override_takes_a_key_back_to_its_default(recipe: Path) -> None:
    loaded = load_recipe(recipe, ["train.seed="])
    assert loaded.spec.train.seed == 0
    assert loaded.origins["train.seed"] == "default"


def test_an_override_cannot_bring_a_second_key(recipe: Path) -> None:
    error = refused(recipe, "name=1\ntrust = true")
    assert 'name: found "1\\ntrust = true" (string)' in error.message


def test_paths_are_resolved_against_the_recipe(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    spec = load_recipe(recipe, ["eval.prompts=prompts/held.jsonl", "eval.heldout=answers.jsonl"]).spec
    assert spec.data.files == (str(tmp_path / "a.jsonl"), "/data/b.jsonl.gz")
    assert spec.eval.prompts == str(tmp_path / "prompts" / "held.jsonl")
    assert spec.eval.heldout == str(tmp_path / "answers.jsonl")
    assert spec.target.model == "HuggingFaceTB/SmolLM2-135M-Instruct", "a hub name stays as it is"
    for given in ("model", "./model"):
        assert load_recipe(recipe, [f"target.model={given}"]).spec.target.model == str(tmp_path / "model")
    assert load_recipe(recipe, ["target.model=../x"]).spec.target.model == str(tmp_path.parent / "x")
    assert load_recipe(recipe, ["target.model=m.gguf"]).spec.target.model == str(tmp_path / "m.gguf")


def test_relative_recipe_path_gives_absolute_files(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(recipe.parent)
    assert load_recipe(Path("recipe.toml")).spec.data.files[0] == str(recipe.parent / "a.jsonl")


def test_all_errors_at_once_each_with_line_key_found_and_expected(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """\
name = "x"
nmae = "y"
[target]
model = "m"
[data]
files = ["a", 3]
pack_tokens = "2048"
seed = true
[train]
max_steps = 1.0
device = "gpu"
learning_rate = 3e-4
[optimiser]
epsilon = 1e-8
[optimizer]
betas = [0.9]
clip_norm = 0
epsilon = nan
""",
    )
    lines = refused(path, "stream.lease_seconds=long").message.splitlines()
    assert lines[0] == f"{path} does not define a run:"
    assert sorted(line.strip() for line in lines[1:]) == sorted(
        [
            "recipe.toml:2: nmae: unknown key; did you mean name?",
            "recipe.toml:6: data.files.1: found 3 (integer), expected a string",
            'recipe.toml:7: data.pack_tokens: found "2048" (string), expected an integer',
            "recipe.toml:8: data.seed: found true (boolean), expected an integer",
            "recipe.toml:10: train.max_steps: found 1.0 (float), expected an integer",
            "recipe.toml:11: train.device: found \"gpu\" (string), expected 'auto', 'cpu' or 'cuda'; "
            "did you mean 'cpu'?",
            "recipe.toml:12: train.learning_rate: unknown key; did you mean optimizer.learning_rate?",
            "recipe.toml:13: optimiser: unknown key; did you mean optimizer?",
            "recipe.toml:16: optimizer.betas.1: missing entry",
            "recipe.toml:17: optimizer.clip_norm: found 0 (integer), expected more than 0",
            "recipe.toml:18: optimizer.epsilon: found NaN (float), expected a finite number",
            'override: stream.lease_seconds: found "long" (string), expected a number',
        ]
    )


def test_unknown_key_far_from_any_lists_the_known_ones(recipe: Path) -> None:
    assert "\n  override: trian: unknown key; did you mean train?" in refused(recipe, "trian.max_steps=3").message
    message = refused(recipe, "checkpoint.zzz=1").message
    assert "override: checkpoint.zzz: unknown key; known keys of [checkpoint]: every_steps, keep" in message


def test_missing_tables_say_what_they_need(tmp_path: Path) -> None:
    message = refused(write(tmp_path, 'name = "x"\n[target]\n')).message
    assert "recipe.toml:2: target.model: missing; expected a local directory, a hub name, or a .gguf file" in message
    assert "\n  data: missing; expected a table with files" in message
    assert "\n  train: missing; expected a table; the training loop." in message


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            'train.activation_checkpointing="x"',
            'checkpointing: found "x" (string), expected true, false, or a number of layers, at least 1',
        ),
        ("train.activation_checkpointing=0", "found 0 (integer), expected true, false, or a number of layers"),
        ("train.cuda_graphs=3", "train.cuda_graphs: found 3 (integer), expected 'auto', true or false"),
        ("target.compile='never'", "target.compile: found \"never\" (string), expected 'auto', true or false"),
        ("drafter.options={a=[1]}", "drafter.options.a: found [1] (array), expected true, false, a number or a string"),
        ("data.files=[1]", "data.files.0: found 1 (integer), expected a string"),
        ("train.seed=18446744073709551616", "train.seed: found 18446744073709551616 (integer), expected less than 1.8"),
        ("drafter.sliding_window=2147483648", "expected less than 2147483648"),
        ("train.epochs=10001", "found 10001 (integer), expected at most 10000"),
        ("data.pack_tokens=12800000000000", "expected at most 16777216"),
        ("data.files=[]", "data.files: found [] (array), expected at least 1 entry"),
    ],
)
def test_one_line_a_problem_without_the_names_of_types(recipe: Path, override: str, words: str) -> None:
    with pytest.raises(SpecInvalidError) as refused:
        load_recipe(recipe, [override])
    ((key, text),) = refused.value.problems
    assert words in text and f"override: {key}: " in text and "write" not in text


def test_every_setting_of_several_types_says_what_belongs_there() -> None:
    """pydantic's own names of the types of a union would be told otherwise."""

    def unions(model: type[BaseModel], prefix: str) -> Iterator[str]:
        for name, field in model.model_fields.items():
            kind: Any = field.annotation
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from unions(kind, f"{prefix}{name}.")
                continue
            if get_origin(kind) is dict:
                kind, name = get_args(kind)[1], f"{name}."
            if get_origin(kind) in (Union, UnionType) and len(set(get_args(kind)) - {NoneType}) > 1:
                yield prefix + name

    assert set(unions(RunSpec, "")) == problems._UNIONS.keys()


def test_overrides_of_another_type_say_how_to_quote(recipe: Path) -> None:
    message = refused(recipe, "target.revision=1234567", "data.files=a.jsonl").message
    assert "target.revision: found 1234567 (integer), expected a string; write target.revision='\"1234567\"'" in message
    assert 'data.files: found "a.jsonl" (string), expected an array; write data.files=\'["a.jsonl"]\'' in message
    assert load_recipe(recipe, ['target.revision="1234567"']).spec.target.revision == "1234567"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.max_steps", "not of the form key=value"),
        ("=3", "not of the form key=value"),
        ("train..x=3", "not of the form key=value"),
        ("data.files=[", "is not a TOML value"),
        ("name.x=3", "name is 'first', not a table"),
    ],
)
def test_broken_overrides(recipe: Path, override: str, words: str) -> None:
    assert words in refused(recipe, override).message


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ('name = "x"\n[train\n', ":2:7: broken TOML"),
        ('name = "x"\nfoo = [1,\n', ":2:end: broken TOML"),
        ('name = "x"\nname = "y"\n', ":2:11: broken TOML"),
        ("name = x\n", ":1:8: broken TOML"),
    ],
)
def test_broken_toml_names_line_and_column(tmp_path: Path, text: str, position: str) -> None:
    path = write(tmp_path, text)
    assert refused(path).message.startswith(f"{path}{position}")


def test_unreadable_recipes(recipe: Path, tmp_path: Path) -> None:
    missing = refused(tmp_path / "recipes.toml")
    assert missing.message == f"no recipe at {tmp_path / 'recipes.toml'}."
    assert missing.remedy == f"Did you mean {recipe}?"
    recipe.write_bytes(b'name = "\xff"')
    assert "is not UTF-8 text (byte 8)" in refused(recipe).message


def test_a_directory_is_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match="is a directory, not a recipe") as refused:
        load_recipe(tmp_path)
    assert "Give the path" in refused.value.remedy
    (tmp_path / "mine.toml").touch()
    with pytest.raises(SlipstreamError) as refused:
        load_recipe(tmp_path)
    assert refused.value.remedy == f"Did you mean {tmp_path / 'mine.toml'}?"


def test_a_byte_order_mark_is_no_error(recipe: Path) -> None:
    recipe.write_bytes(b"\xef\xbb\xbf" + RECIPE.encode())
    assert load_recipe(recipe).origins["name"] == "recipe.toml:1"


def test_lines_are_found_in_every_toml_layout(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '''\
name = "x"
"eval".max_new_tokens = 5
target = { model = """
two
lines""", dtype = "float32" }
data.files = ["[train]"]

  [ train ] # comment
  max_steps = 3
''',
    )
    origins = load_recipe(path).origins
    assert {key: origin for key, origin in origins.items() if origin != "default"} == {
        "name": "recipe.toml:1",
        "eval.max_new_tokens": "recipe.toml:2",
        "target.model": "recipe.toml:3",
        "target.dtype": "recipe.toml:3",
        "data.files": "recipe.toml:6",
        "train.max_steps": "recipe.toml:9",
    }


def test_the_description_loads_to_the_same_run(recipe: Path, tmp_path: Path) -> None:
    overrides = ['drafter.mask_token="<a \\"b\\">"', "optimizer.epsilon=1e-8", "target.dtype=float32"]
    loaded = load_recipe(recipe, [*overrides, "loss.objective={cross_entropy=0.5, tv=0.5}"])
    text = describe(loaded)
    assert "max_steps = 10 " in text
    assert next(line for line in text.splitlines() if line.startswith("dtype = ")).endswith("# override")
    again = tmp_path / "again.toml"
    again.write_text(text)
    assert load_recipe(again).spec == loaded.spec


def test_canonical_json_is_stable() -> None:
    given = DataSpec.model_validate_json('{"seed": 1, "files": ["é.jsonl"], "heldout_fraction": 0}')
    text = canonical_json(given)
    assert text == (
        '{"files":["é.jsonl"],"format":"auto","heldout_fraction":0.0,"max_document_tokens":null,'
        '"pack_tokens":2048,"seed":1,"train_turns":"all","window_documents":512}'
    )
    assert canonical_json(DataSpec.model_validate_json(text, strict=True)) == text


def test_origins_name_every_setting_once(recipe: Path) -> None:
    loaded: LoadedSpec = load_recipe(recipe)
    tables = loaded.spec.model_dump()
    settings = {
        f"{table}.{key}" if key else table
        for table, value in tables.items()
        for key in (value if isinstance(value, dict) else [""])
    }
    assert set(loaded.origins) == settings
