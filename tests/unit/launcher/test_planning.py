"""From a command line and a machine to a stack: where things run, what is kept from before, what is refused."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.errors import SlipstreamError
from slipstream.launcher import planning
from slipstream.launcher.differing import differences
from slipstream.launcher.planning import (
    Wanted,
    choose_address,
    place,
    plan_stack,
    with_addresses,
)
from slipstream.launcher.stack import Stack
from slipstream.machine_probe import GpuFacts, TorchFacts
from slipstream.run_spec.device import resolve_device
from slipstream.run_spec.load import load_recipe
from slipstream.run_spec.reasons import Reason
from tests.unit.launcher.stacks import a_stack

RECIPE = """
name = "r"
[target]
model = "./model"
dtype = "float32"
[data]
files = ["conversations/a.jsonl"]
[train]
max_steps = 1
"""
_GPU = GpuFacts(name="GPU", memory_bytes=1, compute_capability=(9, 0), shared_memory_per_block_bytes=None)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipes" / "r.toml"
    path.parent.mkdir()
    path.write_text(RECIPE)
    return path


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def machine(monkeypatch: pytest.MonkeyPatch, gpus: int, cores: int = 4) -> None:
    monkeypatch.setattr(planning, "probe_torch", lambda: TorchFacts(version="2", gpus=(_GPU,) * gpus))
    monkeypatch.setattr(planning, "usable_cores", lambda: cores)


def plan(wanted: Wanted, before: Stack | None = None) -> Stack:
    return plan_stack(wanted, before, working_directory=Path("/here"))


@pytest.mark.parametrize(
    ("wanted", "gpus", "target", "trainers"),
    [
        (Wanted(), 0, "cpu", ["cpu"]),
        (Wanted(), 1, "cuda:0", ["cuda:0"]),
        (Wanted(), 4, "cuda:0", ["cuda:1", "cuda:2", "cuda:3"]),
        (Wanted(no_target=True), 2, "cuda:0", ["cuda:0", "cuda:1"]),
        (Wanted(devices="cuda:1"), 3, "cuda:1", ["cuda:0", "cuda:2"]),
        (Wanted(devices="cpu"), 2, "cpu", ["cuda:0", "cuda:1"]),
        (Wanted(devices="cuda:0,cuda:1"), 4, "cuda:0,cuda:1", ["cuda:2", "cuda:3"]),
        (Wanted(trainers=0), 2, "cuda:0", []),
        (Wanted(trainers=3), 0, "cpu", ["cpu"] * 3),
        (Wanted(trainers=3), 3, "cuda:0", ["cuda:1", "cuda:2", "cuda:1"]),
        (Wanted(trainer_devices=("cuda:1", "cpu")), 2, "cuda:0", ["cuda:1", "cpu"]),
    ],
)
def test_who_computes_where(wanted: Wanted, gpus: int, target: str, trainers: list[str]) -> None:
    placement = place(wanted, num_gpus=gpus, cores=4)
    assert (placement.target, list(placement.trainers)) == (target, trainers)


@pytest.mark.parametrize(
    ("wanted", "cores", "target", "trainer"),
    [
        (Wanted(), 2, 1, 1),
        (Wanted(), 5, 2, 3),
        (Wanted(), 1, 1, 1),
        (Wanted(trainers=2), 8, 4, 2),
        (Wanted(trainers=9), 4, 2, 1),
        (Wanted(trainers=0), 4, 4, None),
        (Wanted(no_target=True), 4, None, 4),
    ],
)
def test_cores_are_shared(wanted: Wanted, cores: int, target: int | None, trainer: int | None) -> None:
    placement = place(wanted, num_gpus=0, cores=cores)
    assert (placement.target_threads, placement.trainer_threads) == (target, trainer)


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (Wanted(devices="cuda:2"), "--devices names cuda:2, but torch sees 2 GPUs"),
        (Wanted(devices="cuda:0,cuda:2"), "--devices names cuda:2, but torch sees 2 GPUs"),
        (Wanted(devices="cuda:0,tpu"), "--devices names 'tpu'"),
        (Wanted(devices="cpu,cuda:0"), "names GPUs and CPUs"),
        (Wanted(devices="cuda:1,cuda:1"), "names cuda:1 more than once"),
        (Wanted(devices="cuda:0,cuda:1,cuda:2", tensor_parallel=2), "engines of 2 cannot share"),
        (Wanted(devices="cuda:0", tensor_parallel=2), "engines of 2 cannot share"),
        (Wanted(tensor_parallel=2), "--tensor-parallel 2 needs to know which devices"),
        (Wanted(no_target=True, tensor_parallel=2), "--tensor-parallel 2 needs to know which devices"),
        (Wanted(trainer_devices=("cuda:7",)), "--trainer-devices names cuda:7"),
        (Wanted(trainer_devices=("tpu",)), "'tpu' is no device"),
        (Wanted(trainers=2, trainer_devices=("cpu",)), "--trainers is 2, --trainer-devices names 1"),
        (Wanted(no_target=True, model="some/model"), "--no-target"),
        (Wanted(listen="8080"), "--listen is '8080'"),
        (Wanted(target_listen="localhost"), "--target-listen is 'localhost'"),
        (Wanted(recipe="no-such-recipe"), "no-such-recipe"),
        (Wanted(model="some/model", overrides=("target.dtype=float99",)), "float99"),
    ],
)
def test_refused(monkeypatch: pytest.MonkeyPatch, wanted: Wanted, says: str) -> None:
    machine(monkeypatch, gpus=2)
    with pytest.raises(SlipstreamError, match=says) as refused:
        plan(wanted if wanted.no_target or wanted.names_a_target else Wanted(**vars(wanted) | {"model": "some/model"}))
    assert refused.value.exit_code in (2, 4)


def test_a_stack_from_a_recipe(monkeypatch: pytest.MonkeyPatch, recipe: Path) -> None:
    machine(monkeypatch, gpus=0)
    (recipe.parent / "model").mkdir()
    stack = plan(Wanted(recipe=str(recipe), data_roots=(Path("/more"),)))
    assert stack.target is not None and stack.target.model.model == str(recipe.parent / "model")
    # Relative names start where the recipe's do.
    assert stack.data_roots[:3] == (str(recipe.parent), str(recipe.parent / "conversations"), "/here")
    assert stack.data_roots[-1] == "/more" and stack.confined
    assert stack.example[0] == str(recipe)


def test_without_a_recipe_the_packaged_model_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpus=1)
    monkeypatch.setattr(planning, "packaged_model", lambda: "/packages/model.gguf")
    stack = plan(Wanted())
    assert stack.target is not None and stack.target.model.model == "/packages/model.gguf"
    assert not stack.confined
    assert stack.example[:3] == ("demo-smollm2-135m", "--set", "target.model=/packages/model.gguf")
    assert "train.device=cuda" in stack.example


def test_its_own_recipe_serves_the_packaged_model_too(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpus=0)
    monkeypatch.setattr(
        planning, "packaged_copy", lambda target: "/packages/model.gguf" if "/" in target.model else None
    )
    stack = plan(Wanted(recipe="demo-smollm2-135m"))
    assert stack.target is not None and stack.target.model.model == "/packages/model.gguf"
    assert "target.model=/packages/model.gguf" in stack.example
    hub = "HuggingFaceTB/SmolLM2-135M-Instruct"
    monkeypatch.setattr(planning, "target_here", lambda target: target)
    asked = plan(Wanted(recipe="demo-smollm2-135m", overrides=(f"target.model={hub}",)))
    assert asked.target is not None and asked.target.model.model == hub


def test_another_recipe_serves_what_can_be_had_here(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpus=0)
    monkeypatch.setattr(planning, "target_here", lambda target: target.model_copy(update={"model": "/packages/m.gguf"}))
    stack = plan(Wanted(recipe="smollm2-135m-1gpu"))
    assert stack.target is not None and stack.target.model.model == "/packages/m.gguf"
    assert "target.model=/packages/m.gguf" in stack.example


ON_CPU = ["train.device=cpu", "train.attention=sdpa", "train.precision=float32"]
ON_GPU = ["train.device=cuda", "train.attention=flex", "train.precision=bfloat16"]


@pytest.mark.parametrize(
    ("settings", "overrides", "devices", "added"),
    [
        ("", (), ("cpu",), ON_CPU),  # flex is the default, and never starts on a CPU
        ('device = "cuda"', (), ("cpu",), ON_CPU),
        ('device = "cpu"\nattention = "sdpa"', (), ("cpu",), []),
        ('attention = "sdpa"', (), ("cpu",), []),
        ("", ("train.attention=sdpa",), ("cpu",), []),
        ("", (), ("cuda:0",), []),
        ('device = "cuda"', (), ("cuda:0", "cpu"), []),
        ('device = "cpu"\nattention = "sdpa"', (), ("cuda:0",), ON_GPU),
        ('attention = "sdpa"', (), ("cuda:0",), ON_GPU),
        ('attention = "sdpa"', ("train.device=cpu",), ("cuda:0",), []),  # it was asked for
    ],
)
def test_the_suggested_run_can_start_on_the_trainers(
    monkeypatch: pytest.MonkeyPatch,
    recipe: Path,
    settings: str,
    overrides: tuple[str, ...],
    devices: tuple[str, ...],
    added: list[str],
) -> None:
    machine(monkeypatch, gpus=1)
    recipe.write_text(RECIPE + settings)
    stack = plan(Wanted(recipe=str(recipe), overrides=overrides, trainer_devices=devices))
    name, given = stack.example[0], list(stack.example[2::2])
    assert given == [*overrides, *added]
    train = load_recipe(Path(name), given).spec.train
    assert resolve_device(train, cuda_available=devices != ("cpu",)) in ("cpu", "cuda")


def test_nothing_is_added_for_trainers_that_are_not_there(monkeypatch: pytest.MonkeyPatch, recipe: Path) -> None:
    machine(monkeypatch, gpus=0)
    assert plan(Wanted(recipe=str(recipe), trainers=0)).example == (str(recipe),)


def test_what_is_not_said_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpus=3)
    before = a_stack()
    assert plan(Wanted(), before).trainers == before.trainers, "no GPU is asked for"
    moved = plan(Wanted(listen="127.0.0.1:9"), before)
    assert moved.api.listen == "127.0.0.1:9" and moved.target is not None and before.target is not None
    assert (moved.target.model, moved.target.device, moved.trainers) == (
        before.target.model,
        before.target.device,
        before.trainers,
    )
    placed = plan(Wanted(trainers=1), before)
    assert [one.device for one in placed.trainers] == ["cuda:1"]
    assert placed.target is not None and placed.target.model == before.target.model
    alone = plan(Wanted(no_target=True), before)
    assert alone.target is None
    new = plan(Wanted(model="other/model"), before)
    assert new.target is not None and new.target.model.model == "other/model" and len(new.trainers) == 2


def test_engines_stay_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpus=0)
    wanted = Wanted(model="some/model", devices="cpu,cpu", tensor_parallel=2)
    before = plan(wanted)
    again = plan(Wanted(listen="127.0.0.1:9"), before)
    for stack in (before, again):
        assert stack.target is not None and (stack.target.device, stack.target.tensor_parallel) == ("cpu,cpu", 2)
    assert differences(Wanted(tensor_parallel=2, devices="cpu,cpu"), before) == []
    assert differences(Wanted(tensor_parallel=1, devices="cpu"), before) == [
        "--devices cpu (it has cpu,cpu)",
        "--tensor-parallel 1 (it has 2)",
    ]


def test_nothing_is_asked_of_torch_where_all_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "probe_torch", lambda: pytest.fail("this takes seconds"))
    plan(Wanted(model="some/model", devices="cpu", trainer_devices=("cpu",)))
    plan(Wanted(no_target=True, trainer_devices=("cpu", "cpu")))


def test_differences_are_named() -> None:
    running = a_stack()
    assert differences(Wanted(), running) == []
    assert differences(Wanted(listen="127.0.0.1:8080", trainers=1, trainer_devices=("cpu",)), running) == []
    assert differences(Wanted(model="some/model", overrides=("target.dtype=float32",)), running) == []
    wanted = Wanted(listen="127.0.0.1:9", trainers=2, devices="cuda", data_roots=(Path("/x"),), model="a/b")
    assert differences(wanted, running) == [
        "the target a/b in float32 (it has some/model in float32)",
        "--devices cuda (it has cpu)",
        "--trainers 2 (it has 1)",
        "--listen 127.0.0.1:9 (it has 127.0.0.1:8080)",
        "--data-root /x (it has /data/recipe /data)",
    ]
    assert differences(Wanted(no_target=True), running) == ["--no-target (it has the target some/model)"]
    assert differences(Wanted(token_file=Path("/token")), running) == ["--token-file /token (it has no token)"]
    alone = a_stack(target=None)
    assert differences(Wanted(devices="cpu", target_listen="127.0.0.1:9"), alone) == [
        "--devices cpu (it has no target)",
        "--target-listen 127.0.0.1:9 (it has no target)",
    ]
    assert differences(Wanted(no_target=True), alone) == []


def test_settings_of_runs_that_a_stack_was_not_brought_up_with(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpus=0)
    running = plan(Wanted(recipe=str(recipe), overrides=("train.max_steps=5", "train.seed=1")))

    def asked(*overrides: str) -> list[str]:
        return differences(Wanted(recipe=str(recipe), overrides=overrides), running)

    assert asked() == asked("train.max_steps = 5") == []
    assert asked("train.max_steps=6", "train.seed=1", "drafter.num_layers=2") == [
        "--set train.max_steps=6 (it has 5)",
        "--set drafter.num_layers=2 (it has its recipe's)",
    ]
    model = recipe.parent / "model"
    assert asked("target.dtype=bfloat16") == [f"the target {model} in bfloat16 (it has {model} in float32)"]


def test_a_port_is_chosen_once(taken_port: int) -> None:
    with pytest.raises(SlipstreamError, match=f"127.0.0.1:{taken_port} is in use") as refused:
        choose_address(f"127.0.0.1:{taken_port}", None)
    assert refused.value.reason is Reason.PORT_IN_USE
    chosen = choose_address("127.0.0.1:0", None)
    assert choose_address("127.0.0.1:0", chosen) == chosen
    assert choose_address("127.0.0.1:0", f"127.0.0.1:{taken_port}") != f"127.0.0.1:{taken_port}"


def test_what_is_ours_may_hold_its_port(taken_port: int) -> None:
    address = f"127.0.0.1:{taken_port}"
    before = a_stack(api=a_stack().api.model_copy(update={"listen": address, "address": address}), target=None)
    assert with_addresses(before, before, lambda _name: True).api.address == address
    with pytest.raises(SlipstreamError, match="in use"):
        with_addresses(before, before, lambda _name: False)


def test_two_services_have_two_ports() -> None:
    stack = a_stack()
    free = choose_address("127.0.0.1:0", None)
    assert stack.target is not None
    both = stack.model_copy(
        update={
            "api": stack.api.model_copy(update={"listen": free}),
            "target": stack.target.model_copy(update={"listen": free}),
        }
    )
    with pytest.raises(SlipstreamError, match="would both listen on port") as refused:
        with_addresses(both, None, lambda _name: False)
    assert refused.value.reason is Reason.PORT_IN_USE
