"""`slipstream run …` against a served control API: text, JSON, refusals."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

import recipes
from control_api.store import runs, targets
from slipstream import control_client
from slipstream.run_spec.spec import RunSpec
from tests.fakes.control_plane import SPEC, Desk, checkpoint, record, report
from tests.unit.cli.conftest import Command


def train(desk: Desk, assignment: int, first: int, last: int, state: str = "RUNNING") -> None:
    """The trainer reports steps [first, last)."""
    records = [record(step) | {"mean_matched_prefix_with_bonus": 1.5} for step in range(first, last)]
    desk.beat(
        report=report(
            assignment,
            state,
            progress={"step": last, "total_steps": 100},
            metrics={"first_index": first, "records": records},
        )
    )


# ---- create


def test_create_from_a_file(desk: Desk, slipstream: Command, recipe: Path) -> None:
    desk.target()
    answer = slipstream("run", "create", recipe, "--set", "train.seed=7", "--note", "first try", "--name", "other")
    assert (answer.status, answer.out) == (0, "other PENDING on target local\n")
    assert "next: slipstream trainer start" in answer.err
    assert "next: slipstream run watch other" in answer.err
    run = desk.get("runs/other")
    assert run["spec"]["train"]["seed"] == 7
    assert run["spec"]["data"]["files"] == [str(recipe.parent / "conversations.jsonl")], "relative to the recipe"
    assert run["note"] == "first try"


def test_create_what_no_trainer_here_can_train(desk: Desk, slipstream: Command, recipe: Path) -> None:
    desk.target()
    desk.trainer("cpu-only")
    on_gpu = ("--set", "train.device=cuda", "--set", "train.attention=flex")
    answer = slipstream("run", "create", recipe, "--name", "demo", *on_gpu)
    assert (answer.status, answer.out) == (0, "demo PENDING on target local\n")
    assert "demo asks for cuda" in answer.err and "the trainers here offer cpu." in answer.err
    assert "Start a trainer on a machine with a GPU, or create the run with the settings train.device=cpu" in answer.err
    assert answer.err.splitlines()[-2:] == ["next: slipstream trainer ls", "next: slipstream run stop demo"]
    assert "NO_TRAINER_FITS: demo asks for cuda" in slipstream("run", "get", "demo").out
    assert "NO_TRAINER_FITS" in slipstream("run", "ls").out


def test_what_a_plan_refuses_is_not_created(desk: Desk, slipstream: Command, recipe: Path, tmp_path: Path) -> None:
    """In the words of the plan, whose device is the trainer's here."""
    desk.target()
    desk.trainer(devices=[{"kind": "cpu", "memory_bytes": 420 << 20}])
    sizes = {"num_hidden_layers": 12, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(sizes | {"vocab_size": 4096}))
    model = ("--set", f"target.model={tmp_path / 'model'}")
    plan = slipstream("plan", recipe, *model, "--memory", "420MiB")
    answer = slipstream("run", "create", recipe, *model)
    assert (answer.status, plan.status) == (6, 6)
    refused, remedy = answer.err.splitlines()
    assert refused.startswith("error: The run needs ") and refused.endswith("the CPU of trainer t1 has 420 MiB.")
    assert remedy.startswith("  remedy: Nearest settings that fit, with ") and remedy in plan.err.splitlines()
    answer = slipstream("run", "create", recipe, *model, "--set", "drafter.target_layer_ids=[1,99]")
    assert "drafter.target_layer_ids names layer 99, the target has layers 0 to 11" in answer.err
    assert desk.get("runs")["runs"] == []


def test_a_first_drafter_that_is_not_there_is_refused(
    desk: Desk, slipstream: Command, recipe: Path, tmp_path: Path
) -> None:
    desk.target()
    for named, words in (
        ("./runs/none", f"drafter.init_from is {tmp_path / 'runs' / 'none'}, which is no directory on this machine"),
        ("none@best", "drafter.init_from is 'none@best', and there is neither a path of this name nor a run 'none'"),
        ("runs/none", "there is no drafter 'runs/none': it is no path here, and the hub's runs/none is neither in its"),
    ):
        answer = slipstream("run", "create", recipe, "--set", f'drafter.init_from="{named}"')
        assert (answer.status, words in answer.err) == (11, True), answer.err
    (tmp_path / "runs").mkdir()
    answer = slipstream("run", "create", recipe, "--set", 'drafter.init_from="runs/none"')
    assert f"drafter.init_from is {tmp_path / 'runs' / 'none'}, which is no directory" in answer.err


def test_create_says_which_drafter_a_name_means(desk: Desk, slipstream: Command, recipe: Path, tmp_path: Path) -> None:
    path = tmp_path / "demo" / "checkpoints" / "step-00000020"
    path.mkdir(parents=True)
    (path / "manifest.json").touch()
    desk.beat(report=report(desk.running(), "RUNNING", checkpoints=[checkpoint(20) | {"path": str(path)}]))
    answer = slipstream("run", "create", recipe, "--set", "drafter.init_from=demo@20")
    assert (answer.status, f"the run begins with the drafter {path}\n" in answer.err) == (0, True), answer.err
    # Its only trainer has the other run, which may have replaced that checkpoint by then.
    keeps = "demo still trains and keeps its newest 3: once that drafter is none of them this run cannot begin\n"
    assert keeps in answer.err


def test_create_from_a_shipped_recipe_names_its_data_as_every_installation_does(
    desk: Desk, slipstream: Command
) -> None:
    desk.target()
    desk.trainer()
    answer = slipstream("run", "create", "demo-smollm2-135m", "--target", "local", "-o", "json")
    run = json.loads(answer.out)
    assert (answer.status, answer.err) == (0, "")
    assert (run["name"], run["target"]) == ("demo-smollm2-135m", "local")
    # The API has found it where it is installed itself.
    (file,) = run["spec"]["data"]["files"]
    assert Path(file).is_file()


REFUSALS: list[tuple[list[str], int, str]] = [
    (["nowhere.toml"], 2, "no shipped recipe is called 'nowhere.toml'"),
    (["demo-smollm2-135"], 2, "Did you mean 'demo-smollm2-135m'?"),
    (["{recipe}", "--set", "train.max_stepz=1"], 2, "train.max_stepz: unknown key; did you mean train.max_steps?"),
    (["{recipe}", "--name", "Not This"], 2, 'name: found "Not This" (string), expected lower case letters'),
    (["{recipe}", "--name", ""], 2, 'name: found "" (string)'),
    (["{recipe}", "--name", 'a"b'], 2, "name: found"),
    (["{recipe}", "--target", "locl"], 13, "There is no target 'locl'.\n  remedy: Did you mean local?"),
    (["{recipe}", "--name", "taken"], 14, "There is a run 'taken' already; it is PENDING."),
    (["{recipe}", "--note", "x" * 5000], 2, "body.note: String should have at most 4000 characters"),
    ([], 2, ""),
]


def test_create_refuses(desk: Desk, slipstream: Command, recipe: Path) -> None:
    desk.target()
    desk.run("taken")
    for arguments, status, words in REFUSALS:
        answer = slipstream("run", "create", *(one.format(recipe=recipe) for one in arguments))
        assert (answer.status, answer.out) == (status, ""), arguments
        assert words in answer.err
    assert [one["name"] for one in desk.get("runs")["runs"]] == ["taken"]


def test_create_needs_a_target_to_be_named_among_several(desk: Desk, slipstream: Command, recipe: Path) -> None:
    assert slipstream("run", "create", recipe).status == 13
    desk.target("one")
    desk.target("two")
    answer = slipstream("run", "create", recipe)
    assert answer.status == 2
    assert "one, two" in answer.err
    assert slipstream("run", "create", recipe, "--target", "two").status == 0


def test_create_refuses_the_model_of_another_target(desk: Desk, slipstream: Command, recipe: Path) -> None:
    desk.serves("another/model", None)
    answer = slipstream("run", "create", recipe)
    assert answer.status == 8
    assert "serves another/model" in answer.err
    assert "some/model" in answer.err


def test_create_does_not_ask_for_a_trainer_that_has_the_run_already(
    desk: Desk, slipstream: Command, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.target()
    desk.trainer()
    post = control_client.ControlClient.post

    def post_and_assign(client: control_client.ControlClient, *given: Any) -> dict[str, Any]:
        created = post(client, *given)
        desk.reconcile()
        return created

    monkeypatch.setattr(control_client.ControlClient, "post", post_and_assign)
    answer = slipstream("run", "create", recipe)
    assert desk.state("mine") == "STARTING"
    assert answer.err == "next: slipstream run watch mine\n"


MISSING: list[tuple[str, int, str]] = [
    ('data.files=["/none/a.jsonl"]', 3, "data.files names /none/a.jsonl, which does not exist on this machine"),
    ('data.files=["conversation.jsonl"]', 3, "Did you mean {directory}/conversations.jsonl?"),
    ('data.files=["conversations.jsonl", "*.parquet"]', 3, "data.files names {directory}/*.parquet, which does not"),
    ("eval.prompts=prompts.jsonl", 3, "eval.prompts names {directory}/prompts.jsonl, which does not exist"),
    ("eval.heldout=answers.jsonl", 3, "eval.heldout names {directory}/answers.jsonl, which does not exist"),
    ("eval.heldout=answers.jsonl", 3, "`slipstream data regenerate RECIPE --heldout` writes it. Correct the path"),
    ("target.model=./model", 3, "target.model names {directory}/model, which does not exist"),
    ("target.model=model.gguf", 3, "target.model names {directory}/model.gguf, which does not exist"),
]


def test_create_refuses_files_that_are_not_here(desk: Desk, slipstream: Command, recipe: Path) -> None:
    desk.target()
    for override, status, words in MISSING:
        answer = slipstream("run", "create", recipe, "--set", override)
        assert (answer.status, answer.out) == (status, ""), override
        assert words.format(directory=recipe.parent) in answer.err
    assert desk.get("runs")["runs"] == []


@pytest.mark.parametrize(
    "files", [["*.jsonl"], ["."], ["hf://datasets/owner/talks"], ["{shipped}/data/demo_conversations.jsonl.gz"]]
)
def test_create_takes_what_is_here_or_is_no_path(
    desk: Desk, slipstream: Command, recipe: Path, files: list[str]
) -> None:
    desk.target()
    shipped = Path(recipes.__file__).parent
    named = json.dumps([one.format(shipped=shipped) for one in files])
    assert slipstream("run", "create", recipe, "--set", f"data.files={named}").status == 0


@pytest.mark.parametrize("address", ["target:50051", "192.0.2.7:50051"])
def test_create_leaves_files_of_another_machine_alone(
    desk: Desk, slipstream: Command, recipe: Path, address: str
) -> None:
    with desk.services.database.write() as session:
        targets.add(session, name="away", address=address, now=1.0)
    changes = ('data.files=["/none/a.jsonl"]', "eval.prompts=/none/prompts.jsonl", "target.model=/none/model")
    answer = slipstream("run", "create", recipe, *(word for one in changes for word in ("--set", one)))
    assert answer.status == 0, answer.err


def test_create_takes_a_model_that_the_target_serves_already(desk: Desk, slipstream: Command, recipe: Path) -> None:
    desk.serves("/gone/since/model", None)
    assert slipstream("run", "create", recipe, "--set", "target.model=/gone/since/model").status == 0
    answer = slipstream("run", "create", recipe, "--set", "target.model=/mistyped/modle", "--name", "other")
    assert answer.status == 3 and "target.model names /mistyped/modle, which does not exist" in answer.err


# ---- ls and get


def test_ls(desk: Desk, slipstream: Command) -> None:
    assignment = desk.running()
    train(desk, assignment, 0, 42)
    desk.run("waiting")
    desk.reconcile()
    answer = slipstream("run", "ls")
    assert answer.status == 0
    header, first, second = answer.out.splitlines()
    assert (
        " ".join(header.split()) == "NAME STATE PROGRESS STEP LOSS ACCEPTED TOKENS/S ETA TRAINER TARGET TRANSPORT AGE"
    )
    assert " ".join(first.split()[:10]) == "demo RUNNING 42.0% 42/100 0.024 1.50 256 10s t1 local"
    assert " ".join(second.split()[:10]) == "waiting PENDING 0.0% 0/100 - - - - - local"
    assert answer.err == "next: slipstream trainer start\n"
    (only,) = slipstream("run", "ls", "--state", "running").out.splitlines()[1:]
    assert only.split() == first.split()


def test_ls_of_nothing(desk: Desk, slipstream: Command) -> None:
    answer = slipstream("run", "ls")
    assert (answer.status, answer.out, answer.err) == (0, "no runs\n", "next: slipstream run create RECIPE\n")
    assert slipstream("run", "ls", "--state", "PAUSED").out == "no run is PAUSED\n"
    assert json.loads(slipstream("run", "ls", "-o", "json").out) == {"runs": []}


def test_ls_reads_all_pages(desk: Desk, slipstream: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_client, "_PAGE", 4)
    desk.target()
    with desk.services.database.write() as session:
        spec = RunSpec.model_validate(SPEC).model_dump(mode="json")
        target = targets.find(session, "local")
        assert target is not None
        for number in range(11):
            runs.create(session, spec=spec | {"name": f"r{number}"}, target=target, note="", now=1.0)
    found = json.loads(slipstream("run", "ls", "-o", "json").out)["runs"]
    assert [one["name"] for one in found] == [f"r{number}" for number in range(11)]


def test_get(desk: Desk, slipstream: Command) -> None:
    assignment = desk.running()
    train(desk, assignment, 0, 42)
    answer = slipstream("run", "get", "demo")
    assert answer.status == 0
    fields = dict(line.split(maxsplit=1) for line in answer.out.split("\n\n")[0].splitlines())
    assert fields["state"] == "RUNNING"
    assert fields["progress"] == "step 42/100 (42.0%), loss 0.024, accepted length 1.50, tokens/s 256, ETA 10s"
    assert fields["trainer"] == "t1"
    history = [line.split()[2:] for line in answer.out.split("\n\n")[1].splitlines()[1:]]
    assert history == [["PENDING", "create"], ["STARTING", "ASSIGNED", "t1"], ["RUNNING", "FIRST_STEP"]]
    assert answer.err == "next: slipstream run watch demo\n"


def test_old_figures_are_not_shown_while_the_target_is_away(desk: Desk, slipstream: Command) -> None:
    assignment = desk.running()
    train(desk, assignment, 0, 42)
    desk.target(status="UNREACHABLE")
    desk.reconcile()
    (row,) = slipstream("run", "ls").out.splitlines()[1:]
    assert " ".join(row.split()[:9]) == "demo RUNNING 42.0% 42/100 0.024 1.50 - TARGET_UNREACHABLE t1"
    get = slipstream("run", "get", "demo").out
    assert "step 42/100 (42.0%), loss 0.024, accepted length 1.50, TARGET_UNREACHABLE\n" in get
    desk.target()
    desk.reconcile()
    assert "tokens/s 256, ETA 10s" in slipstream("run", "get", "demo").out


def test_old_figures_are_not_shown_while_the_trainer_is_lost(desk: Desk, slipstream: Command) -> None:
    assignment = desk.running()
    train(desk, assignment, 0, 42)
    desk.clock.on_tick = desk.reconcile
    desk.clock.forward(desk.services.settings.trainer_timeout + 10)
    assert "TRAINER_LOST" in desk.conditions()
    (row,) = slipstream("run", "ls").out.splitlines()[1:]
    assert "1.50 - TRAINER_LOST t1" in " ".join(row.split())


def test_get_as_json_and_as_a_recipe(desk: Desk, slipstream: Command, tmp_path: Path) -> None:
    desk.target()
    desk.run(data={"files": [str(tmp_path)], "pack_tokens": 128})
    answer = slipstream("run", "get", "demo", "-o", "json")
    assert (json.loads(answer.out)["name"], answer.err) == ("demo", "")
    path = tmp_path / "again.toml"
    path.write_text(slipstream("run", "get", "demo", "--spec").out)
    assert slipstream("run", "create", path, "--name", "again").status == 0
    assert desk.get("runs/again")["spec"] == desk.get("runs/demo")["spec"] | {"name": "again"}


STRANGE_NAMES = [
    "nobody",
    "",
    ".",
    "..",
    "a/b",
    "demo/events",
    "a b",
    "é",
    "x:stop",
    "a?b#c",
    "%2F",
    "\udcff",
    "\x1b[31m",
]


def test_unknown_runs(desk: Desk, slipstream: Command) -> None:
    desk.target()
    desk.run()
    others = itertools.product(("watch", "logs", "events", "pause", "delete"), ("nobody", "demo/events"))
    for action, name in (*(("get", name) for name in STRANGE_NAMES), *others):
        answer = slipstream("run", action, name)
        assert (answer.status, answer.out) == (13, ""), (action, name)
        assert "There is no run" in answer.err or "Nothing is called" in answer.err, (action, name)
    assert desk.state() == "PENDING"


def test_a_name_that_is_almost_right(desk: Desk, slipstream: Command) -> None:
    desk.target()
    desk.run("baseline")
    answer = slipstream("run", "get", "basline")
    assert (
        "There is no run 'basline'.\n  remedy: Did you mean baseline? `slipstream run ls` lists the runs." in answer.err
    )
