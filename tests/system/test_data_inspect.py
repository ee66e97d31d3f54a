"""`slipstream data inspect` as a person runs it: a real tokenizer, real files, no weights."""

import json
import re
from pathlib import Path

import pytest

from slipstream.data_inspection import Inspection
from slipstream.wire.data_report import Finding
from tests.fakes.hub import serving_dataset
from tests.fakes.processes import ManagedProcess, Processes
from tests.fakes.tiny_tokenizer import build_tiny_tokenizer

GOOD = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there"}]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    build_tiny_tokenizer(directory)
    return directory


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    path = tmp_path / "mixed.jsonl"
    long = {"prompt": "Count", "completion": "one two " * 300}
    lines = [
        json.dumps(GOOD),
        "oops",
        json.dumps(long),
        '{"messages": []}',
        json.dumps({"input_ids": [1], "labels": [1]}),
    ]
    path.write_text("\n".join(lines))
    return path


def inspect(processes: Processes, *arguments: str | Path, status: int = 0) -> ManagedProcess:
    process = processes.start("slipstream.cli", "data", "inspect", *arguments)
    assert process.wait_exit(timeout=90) == status, process.output
    assert "Traceback" not in process.output
    return process


def inspection_of(process: ManagedProcess) -> Inspection:
    """What `-o json` printed; stderr may say before it what takes so long."""
    return Inspection.model_validate_json(process.output[process.output.index("{") :])


def test_tokens_lengths_cuts_and_drops(processes: Processes, mixed: Path, tokenizer: Path) -> None:
    flags = ("--model", tokenizer, "--set", "data.pack_tokens=256")
    output = inspect(processes, mixed, *flags).output
    assert "5 conversations read: 3 used for train, 0 in the other split, 2 dropped" in output
    assert "dropped 1: the line is not valid JSON (mixed.jsonl:2)" in output
    assert "note 1: cut to the token limit (mixed.jsonl:3)" in output
    assert "<|im_start|>assistant↵\n⟦Hello there<|im_end|>⟧" in output
    assert re.search(r"≤ +256 +1 █", output) and "longest 256; cut at 256" in output
    third = inspect(processes, mixed, *flags, "--document", "3").output
    assert "document 3  mixed.jsonl:5: 1 token, 1 supervised" in third


def test_the_same_as_json(processes: Processes, mixed: Path, tokenizer: Path) -> None:
    process = inspect(processes, mixed, "--model", tokenizer, "--limit", "2", "-o", "json")
    inspection = inspection_of(process)
    (source,) = inspection.sources
    assert (source.complete, source.report.read, source.report.count(Finding.BROKEN_JSON)) == (False, 2, 1)
    (document,) = inspection.documents
    assert "".join(token.text for token in document.tokens if token.supervised) == "Hello there<|im_end|>"
    assert [token.text for token in document.tokens if token.special] == ["<|im_start|>", "<|im_end|>"] * 2


def test_strict_and_nothing_usable(processes: Processes, mixed: Path, tokenizer: Path, tmp_path: Path) -> None:
    strict = inspect(processes, mixed, "--model", tokenizer, "--strict", status=3).output
    assert "2 of 5 records are dropped, and --strict is on" in strict and "mixed.jsonl:2" in strict
    empty = tmp_path / "empty.jsonl"
    empty.write_text("oops\n")
    nothing = inspect(processes, empty, "--model", tokenizer, status=3).output
    assert "dropped 1: the line is not valid JSON (empty.jsonl:1)" in nothing
    assert "The only record is not usable" in nothing
    empty.write_text("\n")
    assert "The files hold no record at all." in inspect(processes, empty, "--model", tokenizer, status=3).output


def test_a_recipe_names_data_and_tokenizer(processes: Processes, tiny_recipe: Path) -> None:
    output = inspect(processes, tiny_recipe, "--set", "data.heldout_fraction=0.5").output
    assert re.search(r"120 conversations read: \d+ used for train, [1-9]\d* in the other split, 0 dropped", output)


def test_a_run_that_would_find_no_mask_token_is_told_before(
    processes: Processes, mixed: Path, tokenizer: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        f'name = "r"\ntarget.model = "{tokenizer}"\ndata.files = ["{mixed}"]\ntrain = {{ max_steps = 1 }}\n'
    )
    output = inspect(processes, recipe).output
    assert "a run fails: the target has no mask token and no unused row" in output
    assert "Set drafter.mask_token to a special token that no answer contains (it has: " in output
    named = inspect(processes, recipe, "--set", "drafter.mask_token=<|im_end|>", "-o", "json")
    (whose,) = inspection_of(named).remarks
    assert whose.startswith(f"nothing says who wrote the answers in {mixed.name}") and "data regenerate" in whose
    # Files alone say nothing of a drafter.
    assert "names no mask token" not in inspect(processes, mixed, "--model", tokenizer).output


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("a.jsonl",), 2, "Name the target with --model"),
        (("a.toml", "b.jsonl"), 2, "Give one recipe, or files alone"),
        (("nowhere.jsonl", "--model", "{tokenizer}"), 3, "nowhere.jsonl does not exist"),
        (("{tokenizer}/tokenizer.json", "--model", "./none"), 3, "'./none' does not exist"),
        (("a.jsonl", "--model", "{tokenizer}", "--set", "data.formt=auto"), 2, "formt"),
    ],
)
def test_what_is_refused(
    processes: Processes, tokenizer: Path, arguments: tuple[str, ...], status: int, words: str
) -> None:
    filled = [argument.format(tokenizer=tokenizer) for argument in arguments]
    assert words in inspect(processes, *filled, status=status).output


def test_a_data_set_of_a_hub(processes: Processes, tokenizer: Path, tmp_path: Path) -> None:
    """With token and revision; a second look needs no hub."""
    files = {
        "data/train-0.jsonl": json.dumps(GOOD).encode(),
        "data/test-0.jsonl": b"oops",
        "README.md": b"Nothing that is read.",
    }
    source = "hf://datasets/owner/talks@v1.0"
    with serving_dataset("owner/talks", files, token="hf_right") as (endpoint, asked):
        hub = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "0"}

        def look(token: str, status: int) -> str:
            arguments = ("data", "inspect", source, "--model", tokenizer)
            process = processes.start("slipstream.cli", *arguments, env=hub | {"HF_TOKEN": token})
            assert process.wait_exit(timeout=90) == status, process.output
            assert "Traceback" not in process.output and token not in process.output
            return process.output

        assert "The hub has no data set 'owner/talks', or it is private" in look("hf_wrong", 3)
        assert "data/train-0.jsonl" in (output := look("hf_right", 0)) and "1 used for train" in output
        assert "/api/datasets/owner/talks/revision/v1.0" in asked
        assert not [path for path in asked if path.endswith(".md")]
        hub["HF_HUB_OFFLINE"] = "1"
        asked.clear()
        assert "1 used for train" in look("hf_right", 0)
        assert not asked


def test_a_plan_counts_the_packs_of_the_epochs(processes: Processes, tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "talks.jsonl").write_text(f"{json.dumps(GOOD)}\n" * 3)
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        f'name = "mine"\n[target]\nmodel = "{tokenizer}"\n[data]\nfiles = ["talks.jsonl"]\npack_tokens = 128\n'
        "[train]\nepochs = 2\n"
    )
    sizes = "num_layers=8,hidden_size=64,intermediate_size=64,num_attention_heads=4,vocab_size=300"
    process = processes.start(
        "slipstream.cli", "plan", recipe, "--memory", "24GiB", "--target-config", sizes, "-o", "json"
    )
    assert process.wait_exit(timeout=90) == 0, process.output
    plan = json.loads(process.output[process.output.index("{") :])
    assert plan["run"]["steps"] == plan["data"]["packs"] == 2
    assert plan["data"]["exact"] and plan["data"]["source"] == "counted from all 3 documents"
