"""The packaged model is found by its hub name where the hub cannot be asked, and only there."""

import argparse
from pathlib import Path

import pytest
from huggingface_hub import constants

from drafter_trainer.evaluation import command as evaluation
from drafter_trainer.formats import command as formats
from slipstream.cli.main import run_command
from slipstream.errors import SlipstreamError
from slipstream.packaged_model import HUB_NAME, MODEL_PACKAGE, target_here
from slipstream.run_spec.spec import TargetSpec
from target_server import data_command
from target_server.cli import run_command as serve
from tests.fakes.gguf_files import gguf_without_weights
from tests.unit.trainer_runtime.test_step import make_spec

TARGET = TargetSpec(model=HUB_NAME, dtype="float32")


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with a model, an empty hub cache, and no hub."""
    file = tmp_path / "site" / MODEL_PACKAGE / "tiny.gguf"
    file.parent.mkdir(parents=True)
    (file.parent / "__init__.py").touch()
    file.write_bytes(gguf_without_weights(tied=True))
    monkeypatch.syspath_prepend(str(file.parent.parent))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return file


def test_it_stands_for_its_hub_name(packaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert target_here(TARGET) == TARGET.model_copy(update={"model": str(packaged)})
    for other in (TARGET.model_copy(update={"revision": "v1"}), TARGET.model_copy(update={"model": "some/model"})):
        assert target_here(other) == other, "not what the package holds"
    snapshot = packaged.parents[2] / "cache" / f"models--{HUB_NAME.replace('/', '--')}"
    (snapshot / "snapshots" / "0" / "x").mkdir(parents=True)
    (snapshot / "refs").mkdir()
    (snapshot / "refs" / "main").write_text("0")
    assert target_here(TARGET) == TARGET, "the hub cache has it"


def test_a_hub_that_answers_is_asked(packaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("slipstream.packaged_model.why_unreachable", lambda _: None)
    assert target_here(TARGET) == TARGET
    monkeypatch.setattr("slipstream.packaged_model.why_unreachable", lambda _: "no route")
    assert target_here(TARGET).model == str(packaged)


def test_data_commands_say_what_they_read_instead(
    packaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    data_command.add_parsers(parser.add_subparsers(dest="command"))
    data = tmp_path / "talks.jsonl"
    data.touch()
    args = parser.parse_args(["inspect", "--model", HUB_NAME, "--report", str(tmp_path / "report.json"), str(data)])
    with pytest.raises(SlipstreamError) as refused:  # a header alone is no tokenizer
        data_command.run(args)
    assert str(packaged) in refused.value.message
    assert f"the hub cannot be asked for {HUB_NAME}: " in capsys.readouterr().err


def test_a_plan_takes_its_sizes(packaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        f'name = "mine"\n[target]\nmodel = "{HUB_NAME}"\n[data]\nfiles = ["a.jsonl"]\n[train]\nmax_steps = 10\n'
    )
    assert run_command(["plan", str(recipe), "--memory", "24GiB"]) == 0
    assert "fits: " in capsys.readouterr().out


def test_a_target_server_serves_it(packaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = ["--ledger", str(tmp_path / "ledger.sqlite")]
    with pytest.raises(SlipstreamError) as refused:  # a header alone has no weights
        serve(["serve", "--model", HUB_NAME, "--listen", "127.0.0.1:0", "--no-shm", *ledger])
    assert packaged.name in refused.value.message
    assert f"read instead, {packaged}\n" in capsys.readouterr().err


def test_it_decodes_where_a_drafter_is_measured_or_exported(packaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = make_spec().model_copy(update={"target": TARGET})
    parser = argparse.ArgumentParser()
    evaluation.add_arguments(parser)
    assert evaluation.make_plan(parser.parse_args(["run"]), Path("run"), spec).target.model == str(packaged)
    assert formats.decoding_target(HUB_NAME, make_spec().target).model == str(packaged)
    assert capsys.readouterr().err.count(f"read instead, {packaged}\n") == 2
