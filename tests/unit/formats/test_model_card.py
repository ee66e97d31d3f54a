"""The card beside an export says what it was made from, what was measured and whose licence holds."""

import json
import shutil
import struct
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from drafter_trainer.checkpoint_state import HeldoutEstimate, read_state
from drafter_trainer.cli import main
from drafter_trainer.evaluation.compare import compare
from drafter_trainer.evaluation.decode import Decoded
from drafter_trainer.evaluation.report import as_json, to_dict
from drafter_trainer.evaluation.setting import PLAIN, Setting
from drafter_trainer.formats.card_results import evaluation_results, heldout_results
from drafter_trainer.formats.export import export
from drafter_trainer.formats.model_card import TargetFacts, read_licence, target_facts
from slipstream.answers_settings import settings_beside
from slipstream.errors import SlipstreamError
from slipstream.eval_prompts import Prompt
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import TargetSpec
from slipstream.target_files import TargetFiles, files_at_hand
from tests.unit.formats.conftest import Source, make_plan


def test_the_card_and_the_record(source: Source, tmp_path: Path) -> None:
    write_evaluation(tmp_path / "eval.json", source)
    run = shutil.copytree(source.run, tmp_path / "run", symlinks=True)
    (run / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "seconds": 10}}\n' for n in range(12)))
    checkpoint = run / "checkpoints" / source.checkpoint.name
    export(make_plan(source, tmp_path / "out", "vllm", checkpoint=checkpoint, evaluation=tmp_path / "eval.json"))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "base_model: owner/target\n" in card
    assert "12 of 24 steps, 1,536 tokens, 2.0 minutes of steps" in card
    assert "| batch 1, greedy | trained | all | 2 | 6 | 3.000 [2.00, 4.00] | 6.0 | 3.00x [2.00, 4.00] |" in card
    assert "Acceptance by position, trained, batch 1, greedy: 100% 50% 50%" in card
    assert "Lossless: every output equals plain greedy decoding" in card and "device cpu, dtype float32" in card
    assert "unknown: its files name none" in card
    assert '"num_speculative_tokens": 3' in card and "Not run where this was exported." in card
    record = json.loads((tmp_path / "out" / "slipstream.json").read_text())
    assert record["step"] == 12 and record["self_test"]["equal_drafts"] == record["self_test"]["drafts"]
    assert record["spec"]["name"] == "tiny"


@pytest.mark.parametrize(("model", "words"), [("owner/other", "answers of owner/other, not of the target"), (None, "")])
def test_whose_answers_were_learned(model: str | None, words: str, source: Source, tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    answers.write_text("{}\n")
    if model is not None:
        settings_beside(answers).write_text(json.dumps({"target": model, "target_fingerprint": "0" * 64}))
    plan = make_plan(source, tmp_path / "out", "sglang")
    data = plan.spec.data.model_copy(update={"files": (str(answers),)})
    drafter = plan.spec.drafter.model_copy(update={"init_from": "/runs/earlier"})
    export(replace(plan, spec=plan.spec.model_copy(update={"data": data, "drafter": drafter})))
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"| data | `answers.jsonl`{words and ': '}{words} |" in card
    assert "| begun from | `earlier` |" in card


@pytest.mark.parametrize(
    ("named", "shown"),
    [
        ("/runs/earlier/checkpoints/step-00000040", "earlier@step-00000040"),
        ("earlier@best", "earlier@best"),
        ("some/drafter@v1", "some/drafter@v1"),
    ],
)
def test_what_it_was_begun_from_names_no_path_of_this_machine(
    named: str, shown: str, source: Source, tmp_path: Path
) -> None:
    plan = make_plan(source, tmp_path / "out", target=None)
    drafter = plan.spec.drafter.model_copy(update={"init_from": named})
    export(replace(plan, spec=plan.spec.model_copy(update={"drafter": drafter})))
    assert f"| begun from | `{shown}` |" in (tmp_path / "out" / "README.md").read_text()


def write_evaluation(path: Path, source: Source, **changes: object) -> None:
    """A report as the evaluation of the source's checkpoint writes it: two prompts, a round each."""

    def decoded(emitted: list[int], accepted: list[int], drafts: int) -> Decoded:
        tokens = list(range(sum(emitted) + 1))
        return Decoded(tokens, [1.0] * len(tokens), emitted, drafts, accepted, decode_seconds=len(emitted) / 2)

    decodings = []
    for n in (2, 4):
        by_way = {PLAIN: decoded([1] * n, [0] * n, 0), "trained": decoded([n], [n - 1], 3)}
        decodings.append((Setting(), Prompt(f"p{n}", "math", ()), by_way))
    settings = {
        "run": "tiny",
        "checkpoint": source.checkpoint.name,
        "target": "t",
        "target_verified": True,
        "device": "cpu",
        "dtype": "float32",
        "max_new_tokens": 8,
        "loop": "caches that grow",
        "gap_bound": 0.0,
    }
    path.write_text(as_json(to_dict(compare(decodings, ["trained"], 0.0), settings | changes)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"run": "another"}, "measured step-00000012 of run another, expected step-00000012 of run tiny"),
        ({"checkpoint": "step-00000009"}, "measured step-00000009 of run tiny, expected step-00000012 of run tiny"),
    ],
)
def test_results_of_another_checkpoint_are_refused(
    changes: dict[str, str], words: str, source: Source, tmp_path: Path
) -> None:
    write_evaluation(tmp_path / "eval.json", source, **changes)
    with pytest.raises(SlipstreamError, match=words) as refused:
        export(make_plan(source, tmp_path / "out", evaluation=tmp_path / "eval.json", target=None))
    assert refused.value.reason is Reason.DATA_INVALID and not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["no JSON", "[]", '{"settings": {"run": "tiny"}}', '{"settings": 3}'])
def test_what_is_no_report_is_refused(text: str, source: Source, tmp_path: Path) -> None:
    (tmp_path / "eval.json").write_text(text)
    with pytest.raises(SlipstreamError, match="is no report of an evaluation"):
        export(make_plan(source, tmp_path / "out", evaluation=tmp_path / "eval.json", target=None))


def test_a_drafter_measured_on_an_unproven_target_says_so(source: Source, tmp_path: Path) -> None:
    write_evaluation(tmp_path / "eval.json", source, target_verified=False)
    export(make_plan(source, tmp_path / "out", evaluation=tmp_path / "eval.json", target=None))
    assert "**The target that decoded was not shown" in (tmp_path / "out" / "README.md").read_text()


def test_without_a_report_the_estimate_of_the_training_stands(source: Source, tmp_path: Path) -> None:
    state = read_state(source.checkpoint)
    assert heldout_results(state) is None
    measured = HeldoutEstimate(accepted_length=1.5, by_source={"math": 1.75, "a|b": 1.25}, answers="a")
    text = heldout_results(state.model_copy(update={"heldout": measured}))
    assert text is not None and "| math | 1.750 |" in text and "| all | 1.500 |" in text
    assert "| a\\|b | 1.250 |" in text


def test_a_bar_in_a_source_is_no_new_cell(source: Source, tmp_path: Path) -> None:
    write_evaluation(tmp_path / "eval.json", source)
    report = json.loads((tmp_path / "eval.json").read_text())
    for by_source in report["by_setting"][0]["results"].values():
        by_source["a|b"] = by_source["math"]
    (tmp_path / "eval.json").write_text(json.dumps(report))
    text = evaluation_results(tmp_path / "eval.json", read_state(source.checkpoint), source.checkpoint.name)
    rows = [line for line in text.splitlines() if "a\\|b" in line]
    assert rows and all(row.count("|") - row.count("\\|") == 9 for row in rows)


def test_a_self_test_that_was_left_out_is_recorded(
    source: Source, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--to", "vllm", "--output", str(tmp_path / "out"), "--without-self-test"]
    assert main(["export", f"{source.run}@12", *flags]) == 0
    said = capsys.readouterr().err
    assert " card_names_no_base_model target=target" in said and " verifier_is_a_path_of_this_machine" in said
    card = (tmp_path / "out" / "README.md").read_text()
    assert "**Left out** (`--without-self-test`)" in card
    assert "Of the target's weights: unknown: its files name none." in card, (
        "they lie on this machine, so they were read"
    )
    assert str(tmp_path) not in card and "base_model" not in card, "the target is a directory of this machine"
    assert "vllm serve TARGET \\\n" in card and "which was `target` where the drafter was trained" in card
    assert json.loads((tmp_path / "out" / "slipstream.json").read_text())["self_test"] is None


@pytest.mark.parametrize("known", ["owner/model", "/models/of-mine", None])
def test_a_target_is_named_by_what_a_stranger_can_find(known: str | None, tmp_path: Path) -> None:
    directory = tmp_path / "a-model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"_name_or_path": known}))
    (directory / "tokenizer.json").touch()  # without one it is no model
    trained = TargetSpec(model=str(directory))
    files = files_at_hand(trained)
    found = TargetFacts("a-model", None, None, at_hand=True, only_here=True)
    if known == "owner/model":
        found = TargetFacts(known, known, None, at_hand=True)
    assert target_facts(None, trained, files) == found
    assert target_facts("owner/served", trained, files).hub_name == "owner/served"
    assert target_facts(None, TargetSpec(model="/models/x.gguf"), None).name == "x.gguf"


@pytest.mark.parametrize("model", ["models/mine", "owner/model"])
def test_a_name_is_one_of_the_hub_where_something_shows_it(model: str, tmp_path: Path) -> None:
    trained = TargetSpec(model=model)
    assert files_at_hand(trained) is None
    assert target_facts(None, trained, None) == TargetFacts(model, None, None, at_hand=False)
    assert target_facts(model, trained, None).hub_name == model, "the user says so"
    snapshot = TargetFiles(tmp_path, weights=(), descriptions=(), revision="c0ffee")
    assert target_facts(None, trained, snapshot).hub_name == model


def test_a_name_given_for_the_target_is_no_directory_that_lies_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "Qwen" / "Qwen3-8B").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    trained = TargetSpec(model="Qwen/Qwen3-8B")
    assert target_facts("Qwen/Qwen3-8B", trained, None).hub_name == "Qwen/Qwen3-8B"
    assert target_facts(None, trained, None) == TargetFacts("Qwen3-8B", None, None, at_hand=False, only_here=True)
    assert target_facts("./Qwen/Qwen3-8B", trained, None).hub_name is None


def test_a_relative_path_that_is_not_here_is_no_hub_name() -> None:
    trained = TargetSpec(model="team/models/mine")
    assert files_at_hand(trained) is None
    assert target_facts(None, trained, None) == TargetFacts("mine", None, None, at_hand=False, only_here=True)


@pytest.mark.parametrize(
    ("head", "licence"),
    [
        ("---\nlicense: apache-2.0\n---\n", "apache-2.0"),
        ("# A model\nlicense: no\n", None),
        ("---\ntags: []\n---\n", None),
    ],
)
def test_licence(head: str, licence: str | None, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(head)
    assert read_licence(TargetFiles(tmp_path, weights=(), descriptions=(), revision=None)) == licence


@pytest.mark.parametrize("licence", ["apache-2.0", None])
def test_licence_in_a_gguf_needs_no_library(
    licence: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    texts = {"general.architecture": "llama"} | ({"general.license": licence} if licence else {})
    path = write_header(tmp_path / "model.gguf", texts)
    assert read_licence(TargetFiles(tmp_path, weights=(path,), descriptions=(), revision=None)) == licence


def test_a_gguf_knows_its_model_by_name(tmp_path: Path) -> None:
    path = write_header(tmp_path / "q4.gguf", {"general.name": "A Small Model"})
    trained = TargetSpec(model=str(path))
    found = target_facts(None, trained, files_at_hand(trained))
    assert (found.name, found.also) == ("q4.gguf", "A Small Model"), "nobody can load it by what it calls itself"
    assert target_facts(None, trained, None).name == "q4.gguf"


@pytest.mark.parametrize("form", ["vllm", "sglang", "zlab"])
def test_a_gguf_of_this_machine_is_no_name_for_a_server(
    form: str, source: Source, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_header(tmp_path / "q4.gguf", {"general.name": "A Small Model"})
    plan = make_plan(source, tmp_path / "out", form, target=None, served_as=None)
    spec = plan.spec.model_copy(update={"target": plan.spec.target.model_copy(update={"model": str(path)})})
    with caplog.at_level("WARNING"):
        export(replace(plan, spec=spec))
    card = (tmp_path / "out" / "README.md").read_text()
    config = (tmp_path / "out" / "config.json").read_text()
    assert str(tmp_path) not in card + config
    if form == "vllm":
        assert json.loads(config)["speculators_config"]["verifier"]["name_or_path"] is None
    assert [one.getMessage() for one in caplog.records] == (["verifier_is_not_named"] if form == "vllm" else [])
    if form == "zlab":
        assert (
            'from_pretrained(".", gguf_file="q4.gguf")' in card and "With `q4.gguf` in the working directory." in card
        )
    else:
        assert {"vllm": "vllm serve TARGET ", "sglang": "--model-path TARGET "}[form] in card
        assert "directory of the model that `q4.gguf` was made from, in safetensors." in card


def write_header(path: Path, texts: dict[str, str]) -> Path:
    """A .gguf of texts by key, without tensors."""
    words = [struct.pack("<Q", len(text)) + text.encode() for pair in texts.items() for text in pair]
    body = b"".join(key + struct.pack("<I", 8) + value for key, value in zip(words[::2], words[1::2], strict=True))
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(texts)) + body)
    return path
