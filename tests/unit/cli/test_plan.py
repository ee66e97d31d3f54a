"""`slipstream plan`: what it prints, what it refuses, and that it never loads torch."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli.commands import plan as command
from slipstream.cli.main import run_command
from slipstream.errors import SlipstreamError
from slipstream.packaged_model import names_model
from slipstream.plan.gpus import GPUS, H200
from slipstream.run_spec.reasons import Reason

SIZES = (
    "num_layers=36,hidden_size=4096,intermediate_size=12288,num_attention_heads=32,num_key_value_heads=8,"
    "head_dim=128,vocab_size=151936"
)
RECIPE = """
name = "planned"
[target]
model = "Qwen/Qwen3-8B"
[data]
files = ["a.jsonl"]
pack_tokens = 4096
[train]
device = "cuda"
max_steps = 1000
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "planned.toml"
    path.write_text(RECIPE)
    return str(path)


def planned(recipe: str, *arguments: str) -> int:
    return run_command(["plan", recipe, "--target-config", SIZES, *arguments])


def planned_as_json(capsys: pytest.CaptureFixture[str], recipe: str, *arguments: str) -> dict[str, Any]:
    assert planned(recipe, "-o", "json", *arguments) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_people_see_parts_phases_cards_and_costs(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(recipe, "--memory", "80GiB") == 0
    shown = capsys.readouterr().out
    for words in (
        "masters",
        "logits",
        "backward",
        "optimizer",
        "layers computed again",
        "RTX 4090",
        "H200",
        "a checkpoint",
    ):
        assert words in shown
    assert "75.7 TFLOP" in shown and "1,000 steps" in shown and "assumed: 55% of the A100 80GB's" in shown


def test_programs_get_the_same(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned_as_json(capsys, recipe, "--memory", "80GiB", "--tflops", "757")
    memory = plan["memory"]
    assert plan["name"] == "planned" and not plan["assumed_card"]
    assert plan["fits"] and plan["nearest_settings"] is None
    held = sum(memory["held"].values())
    for phase in memory["phases"].values():
        assert phase["peak_bytes"] == held + sum(phase["parts"].values())
    assert plan["step"]["seconds"] == pytest.approx(0.1, rel=0.01)
    assert plan["run"]["seconds"] == pytest.approx(100.0, rel=0.01)
    assert [card["name"] for card in plan["cards"] if card["fits"]][-1] == "B200"


def test_held_out_measuring_is_priced_where_the_answers_are(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = tmp_path / "heldout.jsonl"
    measured = (recipe, "--memory", "80GiB", "--tflops", "500", "--set", f"eval.heldout={answers}")
    assert planned(*measured) == 0
    assert f"{answers} is no file here" in capsys.readouterr().out
    row = {"source": "news", "target_fingerprint": "f", "input_ids": [5] * 40, "loss_mask": [0] * 8 + [1] * 32}
    answers.write_text(json.dumps(row) + "\n")
    assert planned(*measured) == 0
    shown = capsys.readouterr().out
    assert "1 answers" not in shown and "1 answer, 40 tokens in 1 pack: read once, 160 MiB of host memory" in shown
    assert "1 forward, " in shown and "; 2 in the run, " in shown and "measurement" in shown
    plan = planned_as_json(capsys, *measured)
    assert plan["heldout"]["forwards"] == 1 and plan["heldout"]["measurements"] == 2


def test_what_does_not_fit_is_refused_with_settings_that_do(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SlipstreamError) as refused:
        planned(recipe, "--memory", "16GiB")
    assert refused.value.reason is Reason.OUT_OF_MEMORY and refused.value.exit_code == 6
    assert "16.0 GiB" in refused.value.message
    shown = capsys.readouterr().out
    assert "masters" in shown and "a GPU of this size" in shown, "the tables are shown all the same"
    assert "does not fit: " in shown and " too little" in shown
    words = (
        refused.value.remedy.partition("fit, with ")[2].partition(": ")[2].rstrip(".").partition(". Enough")[0].split()
    )
    overrides = [word for word in words if word != "--set"]
    assert overrides and planned(recipe, "--memory", "16GiB", *(f"--set={setting}" for setting in overrides)) == 0


def test_what_nothing_helps(recipe: str) -> None:
    with pytest.raises(SlipstreamError) as refused:
        planned(recipe, "--memory", "2GiB")
    assert "larger GPU" in refused.value.remedy


def test_without_a_gpu_nothing_is_refused(
    recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "card_of", lambda _: (H200, False))
    assert planned(recipe, "--set", "train.anchors_per_pack=65536") == 0
    assert "nothing is refused" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("setting", "card", "words"),
    [
        ("drafter.head_dim=256", "RTX 5090", "head_dim 256 is larger than 128"),
        ("drafter.head_dim=8", "H200", "head_dim 8 is smaller than 16"),
        ("train.fp8=true", "A100 80GB", "train.fp8 is true, but compute capability 8.0 has no FP8 products"),
    ],
)
def test_what_a_card_cannot_run_does_not_fit_there(
    setting: str,
    card: str,
    words: str,
    recipe: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However much memory it has: a trainer there would refuse the run in the same words."""
    gpu = replace(next(gpu for gpu in GPUS if gpu.name == card), memory_bytes=1 << 40)
    monkeypatch.setattr(command, "card_of", lambda _: (gpu, True))
    with pytest.raises(SlipstreamError) as refused:
        planned(recipe, "--set", setting)
    assert refused.value.reason is Reason.ENVIRONMENT_UNSUPPORTED and refused.value.exit_code == 4
    assert words in refused.value.message and setting.partition("=")[0] in refused.value.remedy
    shown = capsys.readouterr().out
    assert f"cannot run there: {words}" in shown
    (row,) = [line for line in shown.partition("What fits:")[2].splitlines()[3:] if line.startswith(card)]
    if setting == "train.fp8=true":
        # What it cannot do is left out, and the rest is as the recipe has it.
        assert "no; --set train.fp8=false" in row and "--set train.fp8=false." in refused.value.remedy
    else:
        assert f"no; {words}" in row and "--set" not in row
    assert planned(recipe) == 0 and "yes" in capsys.readouterr().out


def test_without_fp8_a_card_may_still_be_too_small(
    recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then no setting is proposed; where there is one, programs read the same as people."""
    a100 = next(gpu for gpu in GPUS if gpu.name == "A100 80GB")
    found = []
    for memory in (a100.memory_bytes, 1 << 30):
        card = replace(a100, memory_bytes=memory)
        monkeypatch.setattr(command, "card_of", lambda _, card=card: (card, True))
        with pytest.raises(SlipstreamError) as refused:
            planned(recipe, "-o", "json", "--set", "train.fp8=true")
        assert refused.value.reason is Reason.ENVIRONMENT_UNSUPPORTED
        plan = json.loads(capsys.readouterr().out)
        assert not plan["fits"] and "no FP8 products" in plan["refusal"] and plan["settings_enough_alone"] == []
        found.append((plan["nearest_settings"], refused.value.remedy))
    assert found == [
        (["train.fp8=false"], "Train on another GPU, or change what it cannot do: --set train.fp8=false."),
        (None, "Train on another GPU: without FP8 the run does not fit into 1.0 GiB, whatever was tried."),
    ]


def test_a_recipe_for_a_cpu_is_planned_for_one(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    cpu = ("--set=train.device=cpu", "--set=train.attention=sdpa", "--set=train.precision=float32")
    assert planned(recipe, "--memory", "140GiB", *cpu) == 0
    shown = capsys.readouterr().out
    assert "the trainer alone, on a CPU" in shown and "Python and torch" in shown and "CUDA" not in shown
    assert "page-locked" not in shown and "H200" not in shown
    assert "GiB predicted, 140.0 GiB there, " in shown and " GiB left" in shown
    (row,) = [line for line in shown.partition("What fits:")[2].splitlines() if line.startswith("a CPU with")]
    assert "  140.0  " in row and row.endswith("yes")
    with pytest.raises(SlipstreamError) as refused:
        planned(recipe, "--memory", "16GiB", *cpu)
    assert "a CPU with" in refused.value.message and "--set drafter.num_layers=" in refused.value.remedy
    with pytest.raises(SlipstreamError) as refused:
        planned(recipe, "--memory", "2GiB", *cpu)
    assert "a machine with more memory" in refused.value.remedy


def test_the_length_of_epochs(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = (recipe, "--memory", "80GiB", "--set", "train.epochs=3", "--epoch-packs", "100")
    assert planned(*told) == 0
    shown = capsys.readouterr().out
    assert "about 300 steps, " in shown and "about 300 packs in 3 epochs, as --epoch-packs says" in shown
    assert planned_as_json(capsys, *told)["run"]["steps"] == 300
    assert planned(*told, "--set", "train.max_steps=7") == 0
    assert "   7 steps, " in capsys.readouterr().out
    with pytest.raises(SlipstreamError) as refused:
        planned(*told, "--set", "train.packs_per_step=301")
    assert "300 packs, a step takes 301" in refused.value.message


def test_epochs_of_data_that_is_not_here(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(recipe, "--memory", "80GiB", "--set", "train.epochs=3") == 0
    shown = capsys.readouterr().out
    assert "at most 1,000 steps" in shown and "not counted: The conversation file " in shown
    hub = ("--set", 'data.files=["hf://datasets/some/talks"]', "--set", "train.max_steps=", "--set", "train.epochs=3")
    assert planned(recipe, "--memory", "80GiB", *hub) == 0
    shown = capsys.readouterr().out
    assert "train.epochs decides, and its packs are not known" in shown and "; give --epoch-packs N" in shown


@pytest.mark.parametrize(
    "flag",
    [
        ("--memory", "lots"),
        ("--memory", "0"),
        ("--memory", "9" * 400),
        ("--tflops", "-1"),
        ("--tflops", "nan"),
        ("--epoch-packs", "0"),
    ],
)
def test_flags_that_mean_nothing(recipe: str, flag: tuple[str, str]) -> None:
    with pytest.raises(SystemExit) as refused:
        planned(recipe, *flag)
    assert refused.value.code == 2


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GiB", 24 << 30), ("80 GB", 80 * 10**9), ("512MiB", 512 << 20), (str(24 << 30), 24 << 30), ("1.5gib", 3 << 29)],
)
def test_sizes(text: str, size: int) -> None:
    assert command.parse_memory(text) == size


def test_torch_is_never_loaded(recipe: str) -> None:
    code = (
        "import sys; from slipstream.cli.main import run_command; "
        f"run_command(['plan', {recipe!r}, '--target-config', {SIZES!r}, '--memory', '80GiB']); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("overrides", "said"),
    [([], False), (["target.dtype=float32"], False), (["target.model=a/b"], True), (["target={model='a/b'}"], True)],
)
def test_only_a_named_model_is_looked_up(overrides: list[str], said: bool) -> None:
    assert names_model(overrides) is said


def test_a_first_drafter_that_is_not_here_is_said_and_one_that_is_none_refused(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path / "home"))

    def begins_with(named: str) -> str:
        assert planned(recipe, "--memory", "80GiB", "--set", f"drafter.init_from={named}") == 0
        return capsys.readouterr().err

    assert "which is no directory on this machine; the plan does not need it" in begins_with("./missing")
    assert f"nor a run (looked for runs/demo, {tmp_path / 'home' / 'runs' / 'demo'})" in begins_with("demo@best")
    assert "the hub's some/drafter is neither in its cache" in begins_with("some/drafter")
    checkpoint = tmp_path / "home" / "runs" / "demo" / "checkpoints" / "step-00000005"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").touch()
    assert begins_with("demo") == begins_with("demo@5") == begins_with(str(checkpoint)) == ""
    with pytest.raises(SlipstreamError, match="has no checkpoint of step 7, expected one of: 5"):
        begins_with("demo@7")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SlipstreamError, match="a directory without a drafter"):
        begins_with("empty")
