"""What commands propose for a run that has failed, and that it can be done."""

from pathlib import Path

import pytest

from slipstream.cli.runs.next_steps import change_first, next_commands
from tests.fakes.control_plane import Desk, report
from tests.unit.cli.conftest import Command


def test_get_says_why_a_run_failed(desk: Desk, slipstream: Command) -> None:
    assignment = desk.running()
    ended = {"child": 1, "reason": "PAYLOAD_CORRUPT", "message": "The wire is bad.", "remedy": "Mend it."}
    desk.beat(report=report(assignment, "FAILED", exit=ended | {"will_restart": False}))
    answer = slipstream("run", "get", "demo")
    assert "PAYLOAD_CORRUPT The wire is bad. Mend it." in answer.out
    assert answer.err == "next: slipstream run logs demo --tail 50\nnext: slipstream run resume demo\n"


def test_a_first_drafter_that_is_gone_is_another_one_in_a_new_run(desk: Desk, slipstream: Command) -> None:
    assignment = desk.running()
    message = "drafter.init_from is /runs/a/checkpoints/step-00000020, which is a checkpoint that its run does not keep"
    ended = {"child": 1, "reason": "CHECKPOINT_INVALID", "message": message, "remedy": "", "will_restart": False}
    desk.beat(report=report(assignment, "FAILED", exit=ended))
    said = slipstream("run", "get", "demo").err
    assert said.startswith("change first: drafter.init_from, in a new run\n")
    assert said.endswith(IN_A_NEW_RUN + "--set drafter.init_from=RUN\n")


def test_held_out_answers_of_another_target_are_made_anew(desk: Desk, slipstream: Command) -> None:
    assignment = desk.running()
    ended = {"child": 1, "reason": "TARGET_FINGERPRINT_MISMATCH", "message": "eval.heldout: the answers in a are of b"}
    desk.beat(report=report(assignment, "FAILED", exit=ended | {"remedy": "", "will_restart": False}))
    said = slipstream("run", "get", "demo").err
    assert said.startswith("change first: the held-out answers, as the message says\n")
    assert said.endswith("next: slipstream run resume demo\n")


IN_A_NEW_RUN = (
    "next: slipstream run get demo --spec > demo-2.toml\nnext: slipstream run create demo-2.toml --name demo-2 "
)


@pytest.mark.parametrize(
    ("reason", "first", "then"),
    [
        ("SPEC_INVALID", "the setting that the message names", IN_A_NEW_RUN + "--set KEY=VALUE"),
        ("MODEL_INVALID", "the model's files, as the message says", "next: slipstream run resume demo"),
        (
            "LOSS_NOT_FINITE",
            "optimizer.learning_rate (0.0006), ",
            IN_A_NEW_RUN + "--set optimizer.learning_rate=0.0003",
        ),
        ("OUT_OF_MEMORY", "train.anchors_per_pack (512), ", IN_A_NEW_RUN + "--set train.anchors_per_pack=256"),
    ],
)
def test_before_a_run_that_would_fail_again_something_is_changed(
    desk: Desk, slipstream: Command, reason: str, first: str, then: str
) -> None:
    assignment = desk.running()
    ended = {"child": 1, "reason": reason, "message": "No.", "remedy": "Change it.", "will_restart": False}
    desk.beat(report=report(assignment, "FAILED", exit=ended))
    said = slipstream("run", "get", "demo").err
    assert said.startswith(f"change first: {first}")
    assert said.endswith(f"\nnext: slipstream run logs demo --tail 50\n{then}\n")
    assert slipstream("run", "ls").err.startswith("change first: "), "a list has no definitions"


@pytest.mark.parametrize(("anchors", "setting"), [(2_000_002, "train.anchors_per_pack=1000001"), (1, "KEY=VALUE")])
def test_a_count_is_written_in_full_and_the_least_is_not_halved(anchors: int, setting: str) -> None:
    spec = {"train": {"anchors_per_pack": anchors}}
    run = {"name": "demo", "state": "FAILED", "reason": "OUT_OF_MEMORY", "message": "Full.", "spec": spec}
    assert next_commands(run)[-1].endswith(f" --set {setting}")
    assert f"train.anchors_per_pack ({anchors})" in str(change_first(run))


def test_the_settings_that_fit_are_those_of_the_message(desk: Desk, slipstream: Command) -> None:
    remedy = (
        "Nearest settings that fit into 900 MiB: --set loss.chunk_rows=64 --set train.packs_per_step=2. Give the "
        "changed one another name (--set name=…)."
    )
    ended = {"child": 1, "reason": "OUT_OF_MEMORY", "message": "Full.", "remedy": remedy, "will_restart": False}
    desk.beat(report=report(desk.running(), "FAILED", exit=ended))
    said = slipstream("run", "get", "demo").err
    assert said.startswith("change first: what the message proposes, in a new run; or end what else fills that memory")
    assert said.endswith(IN_A_NEW_RUN + "--set loss.chunk_rows=64 --set train.packs_per_step=2\n")


def test_what_is_proposed_after_a_failure_can_be_done(
    desk: Desk, slipstream: Command, tmp_path: Path, recipe: Path
) -> None:
    desk.target()
    desk.trainer()
    assert slipstream("run", "create", recipe, "--name", "demo").status == 0
    desk.reconcile()
    assignment = desk.beat()["assignment"]["id"]
    ended = {"child": 1, "reason": "LOSS_NOT_FINITE", "message": "No.", "will_restart": False}
    desk.beat(report=report(assignment, "FAILED", exit=ended))
    *_, write, create = slipstream("run", "get", "demo").err.splitlines()
    words, _, file = write.removeprefix("next: slipstream ").partition(" > ")
    (tmp_path / file).write_text(slipstream(*words.split()).out)
    words = create.removeprefix("next: slipstream ").replace(file, str(tmp_path / file))
    answer = slipstream(*words.split())
    assert answer.out.startswith("demo-2 PENDING"), answer.err
    assert desk.get("runs/demo-2")["spec"]["optimizer"]["learning_rate"] == 3e-4
