"""A run goes to the smallest trainer that can hold it, and says for which it waits where none is free."""

import json
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from control_api.reconciler import Reconciler
from control_api.settings import Settings
from control_api.store import targets
from control_api.store.database import Database
from slipstream.plan.admission import known_sizes
from slipstream.plan.memory import plan_memory
from slipstream.plan.target_sizes import sizes_of_config
from slipstream.run_spec.spec import RunSpec
from tests.fakes.control_plane import SPEC, Desk, assert_problem, checkpoint, report

CONFIG = {
    "num_hidden_layers": 12,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
}
ANCHORS = {"small": 8, "big": 512}
ON_GPU = {"device": "cuda", "attention": "flex", "max_steps": 100}
GIB = 1 << 30


class Hall(Desk):
    """Where runs of two sizes meet trainers of two sizes, each of which holds its own."""

    model: str
    room: dict[str, int]

    def furnish(self, model: Path) -> None:
        """A target that serves `model`."""
        (model / "config.json").write_text(json.dumps(CONFIG))
        self.model = str(model)
        needs = {size: self.needs(**self.of_size(size)) for size in ANCHORS}
        assert needs["small"] < needs["big"]
        self.room = {"small": (needs["small"] + needs["big"]) // 2, "big": 2 * needs["big"]}
        self.target()

    def of_size(self, size: str) -> dict[str, Any]:
        """Sections of the definition of a run."""
        train = SPEC["train"] | {"anchors_per_pack": ANCHORS[size]}
        return {"target": {"model": self.model}, "train": train}

    def needs(self, **sections: Any) -> int:
        """Bytes on a CPU."""
        sizes = known_sizes(RunSpec.model_validate(SPEC | sections))
        assert sizes is not None
        return plan_memory(sizes, GIB).peak_bytes

    def run_of(self, size: str, name: str) -> dict[str, Any]:
        """A new run."""
        return self.run(name, **self.of_size(size))

    def serves_model_of(self, config: dict[str, Any]) -> None:
        """The target has said the sizes of its model."""
        with self.services.database.write() as session:
            row = targets.find(session, "local")
            assert row is not None
            row.sizes = asdict(sizes_of_config(config, "here"))

    def cpu(self, size: str, name: str | None = None, **changes: Any) -> None:
        """A trainer, named after its size."""
        self.trainer(name or size, devices=[{"kind": "cpu", "memory_bytes": self.room[size]}], **changes)

    def gpu(self, name: str, gibibytes: int, capability: tuple[int, int], **facts: Any) -> None:
        """A trainer with a card that no list knows."""
        facts = {"name": "a card", "memory_bytes": gibibytes * GIB, "compute_capability": list(capability)} | facts
        self.trainer(name, devices=[{"kind": "cuda"} | facts])

    def who_has(self, run: str) -> list[str]:
        """The trainers of a run, after a look at all."""
        self.reconcile()
        trainers: list[str] = self.get(f"runs/{run}")["trainers"]
        return trainers

    def why_waits(self, run: str) -> dict[str, str]:
        """The conditions of a run."""
        self.reconcile()
        return {one["type"]: one["message"] for one in self.get(f"runs/{run}")["conditions"]}

    def ends(self, trainer: str, **changes: Any) -> None:
        """The run that it has is trained."""
        work = self.beat(trainer)["assignment"]["id"]
        self.beat(trainer, report(work, "SUCCEEDED"), **changes)

    def only_these_are_heard(self, *trainers: str, seconds: int = 20) -> None:
        """Time passes."""
        for _ in range(seconds // 10):
            self.clock.forward(10)
            for one in trainers:
                self.beat(one)
        self.reconcile()


@pytest.fixture
def hall(desk: Desk, tmp_path: Path) -> Hall:
    made = Hall(desk.client, desk.services, desk.clock)
    (tmp_path / "model").mkdir()
    made.furnish(tmp_path / "model")
    return made


def test_each_run_goes_to_the_smallest_trainer_that_holds_it(hall: Hall) -> None:
    hall.cpu("big")
    hall.cpu("small")
    hall.run_of("small", "modest")
    hall.run_of("big", "greedy")
    assert (hall.who_has("modest"), hall.who_has("greedy")) == (["small"], ["big"])


def test_a_run_waits_for_the_busy_one_that_holds_it_and_says_so(hall: Hall) -> None:
    hall.cpu("big")
    hall.run_of("small", "first")
    assert hall.who_has("first") == ["big"], "no other one was there"
    hall.cpu("small")
    hall.run_of("big", "greedy")
    why = hall.why_waits("greedy")
    assert why.keys() == {"NO_TRAINER_FREE"}
    said = why["NO_TRAINER_FREE"]
    assert said.startswith("Waits for big (has run first). The run needs ") and "the CPU of trainer small has " in said
    hall.run_of("small", "modest")
    assert hall.who_has("modest") == ["small"], "it need not wait behind the other"
    hall.run_of("small", "late")
    hall.ends("big")
    assert hall.who_has("greedy") == ["big"], "who waits longest for the large one has it"
    assert hall.who_has("late") == []
    assert hall.why_waits("late") == {"NO_TRAINER_FREE": "No trainer is free."}
    hall.ends("small")
    assert hall.who_has("late") == ["small"]


def test_nobody_waits_for_a_busy_one_that_is_leaving(hall: Hall) -> None:
    hall.cpu("big")
    hall.run_of("big", "first")
    assert hall.who_has("first") == ["big"]
    hall.cpu("small")
    hall.run_of("big", "greedy")
    assert hall.why_waits("greedy")["NO_TRAINER_FREE"].startswith("Waits for big (has run first). ")
    work = hall.beat("big")["assignment"]["id"]
    hall.beat("big", report(work, "RUNNING"), leaving=True)
    assert hall.who_has("first") == ["big"], "it has not saved yet"
    assert hall.why_waits("greedy")["NO_TRAINER_FREE"].startswith("The run needs ")


def test_that_the_one_that_held_it_has_left_is_said_until_it_is_back(hall: Hall) -> None:
    hall.cpu("big")
    hall.cpu("small")
    created = hall.run_of("big", "greedy")
    assert created["conditions"] == []
    hall.beat("big", leaving=True)
    why = hall.why_waits("greedy")["NO_TRAINER_FITS"]
    assert why.startswith("No trainer here can hold greedy: The run needs ") and "the CPU of trainer small has" in why
    assert why.endswith("Start big again, which could and is not there.")
    hall.client.delete("/v1/trainers/big")
    mebibytes = hall.room["small"] >> 20
    assert (
        f"Start a larger trainer, or create the run anew: `slipstream plan RECIPE --memory {mebibytes}MiB`"
        in (hall.why_waits("greedy")["NO_TRAINER_FITS"])
    )
    hall.cpu("big")
    assert hall.who_has("greedy") == ["big"] and hall.why_waits("greedy") == {}


def test_one_that_is_lost_is_not_replaced_by_one_that_cannot_hold_it(hall: Hall) -> None:
    hall.cpu("big")
    hall.cpu("small")
    hall.run_of("big", "greedy")
    assert hall.who_has("greedy") == ["big"]
    hall.only_these_are_heard("small")
    assert hall.who_has("greedy") == ["big"] and hall.get("trainers/small")["status"] == "FREE"
    lost = hall.why_waits("greedy")["TRAINER_LOST"]
    assert lost.startswith("Nothing is heard of big. The run needs ") and "trainer small has" in lost
    hall.only_these_are_heard("small", seconds=300)
    assert hall.state("greedy") == "FAILED"
    hall.verb("resume", "greedy")
    assert "Start big again" in hall.why_waits("greedy")["NO_TRAINER_FITS"]
    hall.cpu("big", "other-big")
    assert hall.who_has("greedy") == ["other-big"], "a resumed run goes to any that holds it"


def test_a_run_goes_on_where_its_checkpoints_are_if_that_one_holds_it(hall: Hall) -> None:
    hall.cpu("big", storage="disk-1")
    hall.run_of("big", "greedy")
    hall.reconcile()
    work = hall.beat("big")["assignment"]["id"]
    hall.beat("big", report(work, "RUNNING", checkpoints=[checkpoint(10)]))
    hall.verb("stop", "greedy")
    hall.beat("big", report(work, "STOPPED"), leaving=True)
    hall.cpu("big", "elsewhere", storage="disk-2")
    hall.cpu("small", storage="disk-1")
    hall.verb("resume", "greedy")
    why = hall.why_waits("greedy")["NO_TRAINER_FITS"]
    assert "trainer small has" in why and why.endswith("Start big again, which could and is not there.")
    hall.cpu("big", storage="disk-1")
    assert hall.who_has("greedy") == ["big"]


def test_a_trainer_that_comes_back_with_less_memory_gives_its_run_back(hall: Hall) -> None:
    hall.cpu("big")
    hall.run_of("big", "greedy")
    assert hall.who_has("greedy") == ["big"]
    hall.cpu("small", "big")
    assert hall.who_has("greedy") == [] and hall.state("greedy") == "PENDING"
    hall.cpu("big")
    assert hall.who_has("greedy") == ["big"]
    hall.trainer("big", devices=[{"kind": "cpu", "memory_bytes": hall.room["big"] + 1}])
    assert hall.who_has("greedy") == ["big"], "other facts, and it holds it"


def test_one_that_cannot_hold_it_is_not_attached(hall: Hall) -> None:
    hall.cpu("big")
    hall.cpu("small")
    hall.run_of("big", "greedy")
    body = assert_problem(
        hall.client.post("/v1/trainers/small:attach", json={"run": "greedy"}), 409, "TRAINER_UNSUITABLE"
    )
    assert "The run needs " in body["detail"] and "the CPU of trainer small has" in body["detail"]
    hall.post("/v1/trainers/big:attach", {"run": "greedy"})


@pytest.mark.parametrize(
    ("sections", "lacks", "words"),
    [
        ({"train": ON_GPU | {"fp8": True}}, (8, 0), "compute capability 8.0 has no FP8"),
        ({"train": ON_GPU, "drafter": {"head_dim": 256}}, (12, 0), "head_dim 256 is larger than 128"),
        ({"train": ON_GPU}, (7, 5), "no bfloat16"),
    ],
    ids=["FP8", "head_dim", "bfloat16"],
)
def test_what_a_card_cannot_compute_counts_whatever_its_memory(
    hall: Hall, sections: dict[str, Any], lacks: tuple[int, int], words: str
) -> None:
    hall.gpu("older", 80, lacks)
    hall.gpu("able", 140, (9, 0))
    hall.run("first", target={"model": hall.model}, **sections)
    assert hall.who_has("first") == ["able"]
    hall.run("second", target={"model": hall.model}, **sections)
    said = hall.why_waits("second")["NO_TRAINER_FREE"]
    assert said.startswith("Waits for able (has run first). a card of trainer older cannot") and words in said
    hall.ends("able", leaving=True)
    hall.client.delete("/v1/trainers/able")
    assert "Start a trainer on another GPU" in hall.why_waits("second")["NO_TRAINER_FITS"]


def test_a_gpu_is_left_to_those_that_need_it(hall: Hall) -> None:
    hall.gpu("card", 80, (9, 0), host_memory_bytes=hall.room["small"])
    hall.cpu("big")
    hall.run_of("small", "one")
    hall.run_of("small", "two")
    assert (hall.who_has("one"), hall.who_has("two")) == (["big"], ["card"])
    hall.run_of("big", "greedy")
    hall.ends("card")
    assert hall.who_has("greedy") == [], "nor does the host of the GPU hold it"


def test_older_agents_that_say_no_memory_may_have_any_run(hall: Hall) -> None:
    hall.trainer("silent")
    hall.run_of("big", "one")
    assert hall.who_has("one") == ["silent"]
    hall.ends("silent")
    hall.cpu("small")
    hall.cpu("big")
    hall.run_of("big", "two")
    hall.run_of("big", "three")
    assert (hall.who_has("two"), hall.who_has("three")) == (["big"], ["silent"]), "one that is known to hold it first"


def test_where_sizes_are_not_known_the_first_trainer_takes_it(hall: Hall) -> None:
    hall.cpu("big")
    hall.cpu("small")
    hall.run("one", **(hall.of_size("big") | {"target": {"model": "/nowhere/model"}}))
    hall.run("two", **(hall.of_size("big") | {"target": {"model": "/nowhere/model"}}))
    assert (hall.who_has("one"), hall.who_has("two")) == (["big"], ["small"])


def test_files_that_come_while_a_run_waits_count(hall: Hall, tmp_path: Path) -> None:
    config = tmp_path / "model" / "config.json"
    config.rename(tmp_path / "later.json")
    hall.run_of("big", "greedy")
    hall.reconcile()
    (tmp_path / "later.json").rename(config)
    hall.reconcile()
    hall.cpu("small")
    assert "trainer small has" in hall.why_waits("greedy")["NO_TRAINER_FITS"]
    config.unlink()
    assert "trainer small has" in hall.why_waits("greedy")["NO_TRAINER_FITS"], "they are read once"


def test_what_the_target_says_of_its_model_counts_before_files(hall: Hall) -> None:
    elsewhere = hall.of_size("big") | {"target": {"model": "of/another-machine"}}
    hall.cpu("small")
    hall.serves_model_of(CONFIG)
    refused = hall.client.post("/v1/runs", json={"target": "local", "spec": SPEC | elsewhere})
    assert "trainer small has" in assert_problem(refused, 409, "OUT_OF_MEMORY")["detail"]
    hall.cpu("big")
    hall.run("one", **elsewhere)
    hall.run("two", **elsewhere)
    assert hall.who_has("one") == ["big"] and hall.why_waits("two")["NO_TRAINER_FREE"].startswith("Waits for big")
    hall.serves_model_of(CONFIG | {"vocab_size": 8, "intermediate_size": 8, "hidden_size": 16})
    assert hall.who_has("two") == ["small"], "another model is served, which is smaller"
    hall.run_of("big", "three")
    hall.ends("small")
    assert hall.who_has("three") == ["small"], "whatever the files say"


def test_held_out_answers_that_cannot_be_read_now_send_no_run_astray(
    hall: Hall, database: Database, tmp_path: Path
) -> None:
    answers = tmp_path / "answers.jsonl"
    row = {"source": "news", "target_fingerprint": "f", "input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}
    answers.write_text(json.dumps(row))
    hall.cpu("big")
    hall.run("greedy", **hall.of_size("big"), eval={"heldout": str(answers)})
    answers.write_text("made anew at this mom")
    hall.cpu("small")
    restarted = Reconciler(database, Settings(), hall.clock)
    restarted.reconcile()
    assert hall.get("runs/greedy")["trainers"] == ["big"]


class TestWithDataRoots:
    @pytest.fixture
    def settings(self, tmp_path: Path) -> Settings:
        return Settings(data_roots=(tmp_path / "data",))

    def test_a_model_outside_is_not_looked_at(self, hall: Hall, tmp_path: Path) -> None:
        hall.cpu("small")
        hall.run("greedy", **hall.of_size("big"), data=SPEC["data"] | {"files": [str(tmp_path / "data" / "a.jsonl")]})
        assert hall.who_has("greedy") == ["small"]
        hall.ends("small")
        hall.serves_model_of(CONFIG)
        hall.cpu("big")
        hall.run("again", **hall.of_size("big"), data=SPEC["data"] | {"files": [str(tmp_path / "data" / "a.jsonl")]})
        assert hall.who_has("again") == ["big"], "its server may say its sizes"


def test_control_planes_that_look_at_once_give_no_trainer_twice(hall: Hall, database: Database) -> None:
    names = [f"{size}-{number}" for size in ANCHORS for number in range(3)]
    for name in names:
        hall.cpu(name.partition("-")[0], name)
        hall.run_of(name.partition("-")[0], name)
    opened = [Database(f"sqlite:///{database.path}", busy_seconds=60.0) for _ in range(4)]
    start = threading.Barrier(len(opened))

    def look(own: Database) -> None:
        reconciler = Reconciler(own, Settings(), hall.clock)
        start.wait(60)
        reconciler.reconcile()

    threads = [threading.Thread(target=look, args=(own,)) for own in opened]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    for own in opened:
        own.close()
    given = {run["name"]: run["trainers"] for run in hall.get("runs")["runs"]}
    assert sorted(trainer for trainers in given.values() for trainer in trainers) == sorted(names)
    assert all(trainer.startswith(run.partition("-")[0]) for run, [trainer] in given.items())
