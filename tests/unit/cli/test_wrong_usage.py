"""What a stranger types wrong is refused at once, in words that name neither our functions nor our REST paths."""

from pathlib import Path

import pytest

from control_api.cli import serve
from drafter_trainer.cli import build_parser
from drafter_trainer.cli import main as train
from slipstream.cli.main import run_command
from slipstream.errors import SlipstreamError
from slipstream.packaged_model import given_model
from slipstream.run_spec.reasons import Reason
from target_server.cli import read_target
from target_server.data_command import read_sources
from tests.fakes.control_plane import Desk
from tests.unit.cli.conftest import Command


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("run ls --state x", "PENDING"),
        ("run logs a --tail many", "'many' is no number of lines from 0 to 1,000,000,000"),
        ("run pause a --timeout nan", "'nan' is no number of seconds from 0 to"),
        ("run pause a --timeout inf", "'inf' is no number of seconds from 0 to"),
        ("up --trainers x", "'x' is no number of trainers from 0 to 1,000"),
        ("up --tensor-parallel 0", "'0' is no number of devices from 1 to 1,000"),
        ("up --devices cpu,cuda:0", "--devices cpu,cuda:0 names GPUs and CPUs."),
        ("up --model ./no-such.gguf", "--model ./no-such.gguf does not exist."),
        ("demo --model /no/such", "--model /no/such does not exist."),
    ],
)
def test_values_of_flags(slipstream: Command, words: str, says: str) -> None:
    answer = slipstream(*words.split())
    assert answer.status in (2, 3) and says in answer.err and "RunState" not in answer.err


@pytest.mark.parametrize(
    ("words", "speaks", "says"),
    [
        ("rnu ls", "slipstream", "'rnu' (choose from"),
        ("rnu ls", "slipstream", "; did you mean run?"),
        ("run creat x", "slipstream run", "; did you mean create?"),
        ("run show demo", "slipstream run", "; did you mean get or ls?"),
        ("run demo get", "slipstream run", "; did you mean slipstream run get demo?"),
        ("run rm demo", "slipstream run", "; did you mean delete?"),
        ("run start demo", "slipstream run", "; did you mean create or resume?"),
        ("run", "slipstream run", "required: ACTION, one of create, ls, get, "),
        ("trainer rm t1", "slipstream trainer", "; did you mean remove?"),
        ("logs demo", "slipstream", "; did you mean slipstream run logs?"),
        ("export demo", "slipstream", "; did you mean slipstream checkpoint export?"),
        ("train mine.toml", "slipstream", "; did you mean slipstream run create?"),
        ("checkpoint export x --to vlm", "slipstream checkpoint export", "; did you mean vllm?"),
        ("up --traners 2", "slipstream up", "unrecognized arguments: --traners; did you mean --trainers?"),
        ("run ls --stat=RUNING --no-such", "slipstream run ls", "did you mean RUNNING?"),
        ("run get demo --zzz", "slipstream run get", "unrecognized arguments: --zzz\n"),
        ("run get demo two", "slipstream run get", "unrecognized arguments: two\n"),
    ],
)
def test_mistyped_words_are_refused_by_their_own_command(
    capsys: pytest.CaptureFixture[str], words: str, speaks: str, says: str
) -> None:
    with pytest.raises(SystemExit) as left:
        run_command(words.split())
    said = capsys.readouterr().err
    assert left.value.code == 2 and said.startswith(f"usage: {speaks} [-h]")
    assert f"\n{speaks}: error: " in said and says in said


def test_values_of_flags_of_the_other_programs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve(["--grace-seconds", "x"])
    for flags in (["--jobs", "x"], ["--temperatures", "0,x"]):
        with pytest.raises(SystemExit):
            build_parser().parse_args(["eval", "run", *flags])
    for words in (["run", "r", "--threads", "0"], ["worker", "--threads", "many"], ["run", "r", "--log-every", "nan"]):
        with pytest.raises(SystemExit):
            build_parser().parse_args(words)
    said = capsys.readouterr().err
    assert "'0' is no number of threads from 1" in said and "'nan' is no number of seconds" in said
    for words in (
        "'x' is no number of seconds from 0.001 to",
        "'x' is no number of processes from 1 to",
        "0,x: a temperature is a",
    ):
        assert words in said
    assert " invalid _" not in said


def test_recipes_that_ship_have_names_in_every_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert train(["run", "demo-smollm2-135m", "--dry-run"]) == 0
    assert 'name = "demo-smollm2-135m"' in capsys.readouterr().out
    target, data = read_target("demo-smollm2-135m", None, [])
    assert target.dtype == "float32" and data is not None and data.pack_tokens == 256
    assert read_sources(["demo-smollm2-135m"], None, []).data == data
    for wrong in (lambda: read_target("demo-smollm", None, []), lambda: read_sources(["demo-smollm"], None, [])):
        with pytest.raises(SlipstreamError, match="no shipped recipe is called 'demo-smollm', and no file here"):
            wrong()
    assert train(["run", "demo-smollm"]) == 2


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("mx.toml", "Did you mean 'my.toml'?"),
        ("my", "Did you mean 'my.toml'?"),
        ("zzz.toml", "Shipped recipes: demo-smollm2-135m, "),
        ("zzz.toml", " Here: my.toml, own recipe.toml, torn.toml."),
        ("öwn recipe.toml", "Did you mean 'own recipe.toml'?"),
        ("demo-smollm", "Did you mean 'demo-smollm2-135m'?"),
        ("https://hub/some/model", "Download the recipe and give its path; a model is named with --model"),
        ("some/model", "A model is named with --model some/model"),
        ("some/recipe.toml", "Give the path of a .toml file."),
        ("model", "A model is named with --model model"),
        ("tiny.gguf", "A model is named with --model tiny.gguf"),
        ("folder", "Give the path of a .toml file."),
        ("torn.toml", "Save the recipe as UTF-8."),
    ],
)
def test_what_is_no_recipe(
    given: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slipstream: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("my.toml", "own recipe.toml", "pyproject.toml"):
        (tmp_path / file).touch()
    for folder in ("folder", "model"):
        (tmp_path / folder).mkdir()
    (tmp_path / "model" / "config.json").touch()
    for file in ("tiny.gguf", "torn.toml"):
        (tmp_path / file).write_bytes(b"GGUF\xff\xfe\x00")
    for command in (("recipe", "show"), ("plan",), ("run", "create")):
        answer = slipstream(*command, given)
        assert (answer.status, words in answer.err) == (2, True), answer.err


def test_recipes_are_listed_as_everything_is(slipstream: Command) -> None:
    assert slipstream("recipe", "ls").out == slipstream("recipe", "list").out != ""


def test_no_target_is_registered(desk: Desk, slipstream: Command) -> None:
    answer = slipstream("run", "create", "demo-smollm2-135m")
    assert answer.status == 13
    assert answer.err.startswith("error: No target is registered.\n  remedy: `slipstream up` brings one up; ")
    assert "/v1/" not in answer.err


def test_a_model_is_a_path_that_is_there_or_the_name_of_a_hub(tmp_path: Path) -> None:
    assert given_model("owner/name") == "owner/name"
    with pytest.raises(SlipstreamError, match="has no config.json"):
        given_model(str(tmp_path))
    (tmp_path / "talks.jsonl").touch()
    with pytest.raises(SlipstreamError, match="is a file, but not a .gguf file"):
        given_model(str(tmp_path / "talks.jsonl"))
    for file in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / file).touch()
    assert given_model(str(tmp_path)) == str(tmp_path)
    with pytest.raises(SlipstreamError) as refused:
        given_model(str(tmp_path / "none"))
    assert refused.value.reason is Reason.MODEL_INVALID and refused.value.exit_code == 3


@pytest.mark.parametrize(
    ("model", "says"),
    [("./models/mine", "does not exist."), ("./empty", "has no config.json."), ("none.gguf", "exist.")],
)
def test_a_recipe_without_its_model_starts_no_stack(model: str, says: str, tmp_path: Path, slipstream: Command) -> None:
    (tmp_path / "empty").mkdir()
    recipe = tmp_path / "mine.toml"
    recipe.write_text(f'name = "mine"\ntarget.model = "{model}"\ndata.files = ["a.jsonl"]\ntrain.epochs = 1\n')
    home = tmp_path / "home"
    answer = slipstream("up", str(recipe), "--home", str(home), "--trainer-devices", "cpu", "--devices", "cpu")
    assert (answer.status, says in answer.err) == (3, True), answer.err
    assert not home.exists()
