"""/v1/runs: definitions, verbs, keys, records."""

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

import recipes
from control_api.dependencies import Services
from control_api.settings import Settings
from control_api.store import runs
from slipstream.run_spec.states import VERB_TABLE, RunState, Verb, Verdict
from tests.fakes.control_plane import SPEC, Desk, assert_problem

RECIPE = """
name = "from-recipe"
[target]
model = "some/model"
[data]
files = ["/data/a.jsonl"]
[train]
device = "cpu"
attention = "sdpa"
max_steps = 5
"""


@pytest.fixture(autouse=True)
def _target(desk: Desk) -> None:
    desk.target()


@pytest.fixture
def put(services: Services, desk: Desk) -> Callable[[RunState], None]:
    """Puts the run `demo` into a state."""

    def put(state: RunState) -> None:
        desk.run()
        with services.database.write() as session:
            row = runs.find(session, "demo")
            assert row is not None
            runs.move(session, row, state, runs.Cause("test"), now=desk.clock())

    return put


def test_created_from_json(desk: Desk) -> None:
    run = desk.run()
    assert (run["state"], run["desired_state"], run["target"]) == ("PENDING", "RUNNING", "local")
    assert run["allowed_verbs"] == ["stop"]
    assert run["progress"] == {"step": 0, "max_steps": 100, "fraction": 0.0, "eta_seconds": None}
    assert run["spec"]["optimizer"]["learning_rate"] == 6e-4, "the definition is complete"
    assert [one["cause"] for one in run["history"]] == ["create"]
    assert desk.get("runs/demo") == run
    assert [one["name"] for one in desk.get("runs?state=PENDING")["runs"]] == ["demo"]
    assert desk.get("runs?state=RUNNING")["runs"] == []


def test_created_from_a_recipe_with_overrides(desk: Desk) -> None:
    overrides = ["train.max_steps=7", "name=renamed", "train.max_tokens=10000"]
    run = desk.post("/v1/runs", {"target": "local", "recipe": RECIPE, "overrides": overrides}, status=201)
    assert (run["name"], run["spec"]["train"]["max_steps"]) == ("renamed", 7)
    assert run["progress"]["max_steps"] == 4, "10000 tokens are four packs of 2048"


@pytest.mark.parametrize(
    ("recipe", "overrides", "location", "detail"),
    [
        (RECIPE + "max_stepz = 1\n", [], "body.spec.train.max_stepz", "recipe.toml:11: train.max_stepz: unknown key"),
        (RECIPE, ["train.max_steps=many"], "body.spec.train.max_steps", "override: train.max_steps: found"),
        (RECIPE, ["train.max_steps="], "body.spec.train", "the run never ends"),
        (RECIPE.replace('"from-recipe"', '"From Recipe"'), [], "body.spec.name", "recipe.toml:2: name"),
        ("", [], "body.spec.name", "missing"),
    ],
)
def test_recipe_errors_name_the_key(
    client: TestClient, recipe: str, overrides: list[str], location: str, detail: str
) -> None:
    response = client.post("/v1/runs", json={"target": "local", "recipe": recipe, "overrides": overrides})
    body = assert_problem(response, 422, "SPEC_INVALID")
    found = {one["location"]: one["detail"] for one in body["errors"]}
    assert detail in found[location]


@pytest.mark.parametrize(
    ("recipe", "detail"),
    [
        ("name = ", "recipe.toml:1:"),
        ("a = " + "[" * 50_000, "nested"),
        ("\n" * 3000, "more than 2000 lines"),
        ("\x00", "broken TOML"),
    ],
)
def test_broken_recipes(client: TestClient, recipe: str, detail: str) -> None:
    body = assert_problem(client.post("/v1/runs", json={"target": "local", "recipe": recipe}), 422, "SPEC_INVALID")
    assert detail in body["detail"]


@pytest.mark.parametrize(
    "body",
    [
        {"target": "local"},
        {"target": "local", "spec": SPEC, "recipe": RECIPE},
        {"target": "local", "spec": "text"},
        {"target": "local", "spec": {"name": float("1e999")}},
        {"target": "local", "spec": {"name": "\ud800"}},
        {"target": "local", "spec": {"a": [[[[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]]]}},
        {"target": "local", "recipe": RECIPE, "overrides": "train.max_steps=1"},
        {"target": 7, "recipe": RECIPE},
        {"target": "local", "recipe": RECIPE, "note": "x" * 5000},
    ],
)
def test_bodies_of_the_wrong_type(client: TestClient, body: dict[str, Any]) -> None:
    response = client.post("/v1/runs", content=json.dumps(body), headers={"content-type": "application/json"})
    assert assert_problem(response, 422, "REQUEST_INVALID")["errors"]


def test_spec_errors_name_the_key(client: TestClient) -> None:
    spec = SPEC | {"train": SPEC["train"] | {"max_steps": "100"}}
    body = assert_problem(client.post("/v1/runs", json={"target": "local", "spec": spec}), 422, "SPEC_INVALID")
    assert [one["location"] for one in body["errors"]] == ["body.spec.train.max_steps"]
    assert "slipstream recipe show" not in body["detail"], "that is a remedy for a file"


def test_unknown_target(client: TestClient) -> None:
    body = assert_problem(client.post("/v1/runs", json={"target": "other", "spec": SPEC}), 404, "TARGET_UNKNOWN")
    assert "'other'" in body["detail"]


def test_the_only_target_need_not_be_named(client: TestClient, desk: Desk) -> None:
    assert desk.post("/v1/runs", {"spec": SPEC}, status=201)["target"] == "local"
    desk.target("other")
    body = assert_problem(client.post("/v1/runs", json={"spec": SPEC | {"name": "b"}}), 422, "REQUEST_INVALID")
    assert "one of: local, other" in body["detail"]


def test_without_any_target(client: TestClient, desk: Desk) -> None:
    assert client.delete("/v1/targets/local").status_code == 204
    body = assert_problem(client.post("/v1/runs", json={"spec": SPEC}), 404, "TARGET_UNKNOWN")
    assert "POST /v1/targets" in body["detail"]


COMMIT = "0123456789" * 4


@pytest.mark.parametrize(
    ("wanted", "served", "refused"),
    [
        ({}, ("some/model", COMMIT), False),
        ({}, ("Some/Model", COMMIT), False),
        ({}, ("other/model", COMMIT), True),
        ({"revision": COMMIT}, ("some/model", COMMIT), False),
        ({"revision": COMMIT[::-1]}, ("some/model", COMMIT), True),
        ({"revision": "main"}, ("some/model", COMMIT), False),
        ({"revision": COMMIT}, ("some/model", None), False),
        ({}, ("model", None), False),  # a directory of that name, perhaps a copy
        ({}, ("weights.gguf", None), False),
        ({"model": "/models/a"}, ("other/model", COMMIT), False),
        ({"model": "./a/b"}, ("other/model", COMMIT), False),
        ({"model": "files/a.gguf"}, ("other/model", COMMIT), False),
        ({"model": "gpt2"}, ("other/model", COMMIT), False),
    ],
)
def test_only_what_is_surely_another_model_is_refused(
    client: TestClient, desk: Desk, wanted: dict[str, str], served: tuple[str, str | None], refused: bool
) -> None:
    desk.target("other")
    desk.serves(*served)
    spec = SPEC | {"target": SPEC["target"] | wanted}
    created = client.post("/v1/runs", json={"target": "local", "spec": spec})
    if refused:
        body = assert_problem(created, 409, "TARGET_INCOMPATIBLE")
        assert f"target.model={served[0]}" in body["detail"]
        desk.post("/v1/runs", {"target": "other", "spec": spec}, status=201)
        assert_problem(client.patch("/v1/runs/demo", json={"target": "local"}), 409, "TARGET_INCOMPATIBLE")
    else:
        assert created.status_code == 201


def test_a_target_that_turns_out_to_be_another_model(client: TestClient, desk: Desk) -> None:
    desk.run()
    desk.serves("other/model", COMMIT)
    desk.trainer()
    desk.reconcile()
    [condition] = desk.get("runs/demo")["conditions"]
    assert condition["message"] == "Target 'local' serves other/model, the run is defined for some/model."
    assert_problem(client.post("/v1/trainers/t1:attach", json={"run": "demo"}), 409, "TARGET_INCOMPATIBLE")
    desk.serves("some/model", COMMIT)
    desk.reconcile()
    assert desk.state() == "STARTING"


def test_every_shipped_recipe_makes_a_run(desk: Desk) -> None:
    shipped = desk.get("recipes")["recipes"]
    assert [one["name"] for one in shipped] == list(recipes.recipe_names())
    for one in shipped:
        assert 20 < len(one["summary"]) < 200
        assert not one["summary"].startswith("#")
        overrides = [] if "data/" in one["text"] else ['data.files=["/data/a.jsonl"]']
        run = desk.post("/v1/runs", {"recipe": one["text"], "overrides": overrides}, status=201)
        assert run["name"] == one["name"]
        assert overrides or all(Path(file).is_file() for file in run["spec"]["data"]["files"])


WAYS = {
    "PENDING": ["stop", "delete"],
    "STARTING": ["stop", "delete"],
    "RUNNING": ["stop", "delete"],
    "PAUSING": ["stop", "delete"],
    "PAUSED": ["stop", "delete"],
    "STOPPING": ["delete"],
    "STOPPED": ["resume", "delete"],
    "FAILED": ["resume", "delete"],
    "SUCCEEDED": ["delete"],
}


@pytest.mark.parametrize("state", RunState)
def test_names_are_unique(client: TestClient, put: Callable[[RunState], None], state: RunState) -> None:
    put(state)
    refusal = client.post("/v1/runs", json={"target": "local", "spec": SPEC})
    detail = assert_problem(refusal, 409, "NAME_TAKEN")["detail"]
    assert detail.startswith(f"There is a run 'demo' already; it is {state}. Give the new one another name (--name")
    assert re.findall(r"`slipstream run (\w+) demo`", detail) == WAYS[state], "what the state permits"
    assert ("once it is STOPPED" in detail) == (state is RunState.STOPPING)


@pytest.mark.parametrize("file", ["a.jsonl", "../a.jsonl", "~/a.jsonl"])
def test_relative_files_need_a_root(client: TestClient, file: str) -> None:
    spec = SPEC | {"data": {"files": [file]}}
    assert_problem(client.post("/v1/runs", json={"target": "local", "spec": spec}), 422, "PATH_NOT_ALLOWED")


@pytest.mark.parametrize(
    ("file", "found"),
    [
        ("a.jsonl", "/data/one/a.jsonl"),
        ("/data/two/b/a.jsonl", "/data/two/b/a.jsonl"),
        ("b/../a.jsonl", "/data/one/a.jsonl"),
        ("../a.jsonl", None),
        ("/etc/passwd", None),
        ("/data/one/../../etc/passwd", None),
        ("/data/oneself/a.jsonl", None),
        ("data/demo_conversations.jsonl.gz", str(Path(recipes.__file__).parent / "data/demo_conversations.jsonl.gz")),
        ("data/../__init__.py", "/data/one/__init__.py"),
        ("data/" + "x" * 5000, "/data/one/data/" + "x" * 5000),
        ("hf://datasets/owner/name@0123abc", "hf://datasets/owner/name@0123abc"),
    ],
)
def test_files_stay_inside_the_roots(app: FastAPI, client: TestClient, file: str, found: str | None) -> None:
    settings = Settings(data_roots=(Path("/data/one"), Path("/data/two")))
    app.state.services = replace(app.state.services, settings=settings)
    spec = SPEC | {"data": {"files": [file]}}
    response = client.post("/v1/runs", json={"target": "local", "spec": spec})
    if found is None:
        assert_problem(response, 422, "PATH_NOT_ALLOWED")
    else:
        assert response.json()["spec"]["data"]["files"] == [found]


@pytest.mark.parametrize("key", ["prompts", "heldout"])
def test_files_of_the_evaluation_stay_inside_the_roots(app: FastAPI, client: TestClient, key: str) -> None:
    app.state.services = replace(app.state.services, settings=Settings(data_roots=(Path("/data/one"),)))
    inside = SPEC | {"data": {"files": ["a.jsonl"]}}
    refused = client.post("/v1/runs", json={"target": "local", "spec": inside | {"eval": {key: "/etc/passwd"}}})
    assert_problem(refused, 422, "PATH_NOT_ALLOWED")
    created = client.post("/v1/runs", json={"target": "local", "spec": inside | {"eval": {key: "a.jsonl"}}})
    assert created.json()["spec"]["eval"][key] == "/data/one/a.jsonl"


@pytest.mark.parametrize("verb", Verb)
@pytest.mark.parametrize("state", RunState)
def test_every_verb_in_every_state(
    client: TestClient, desk: Desk, put: Callable[[RunState], None], state: RunState, verb: Verb
) -> None:
    put(state)
    before = desk.get("runs/demo")
    response = client.post(f"/v1/runs/demo:{verb}")
    outcome = VERB_TABLE[verb][state]
    if outcome is Verdict.ILLEGAL:
        body = assert_problem(response, 409, "TRANSITION_ILLEGAL")
        assert body["current_state"] == state
        assert body["allowed_verbs"] == before["allowed_verbs"]
        assert verb not in body["allowed_verbs"]
        assert desk.get("runs/demo") == before
    elif outcome is Verdict.NO_OP:
        assert response.json() == before
    else:
        assert response.json()["state"] == outcome
        assert response.json()["history"][-1]["cause"] == verb


@pytest.mark.parametrize("state", RunState)
def test_deleted_only_at_rest(client: TestClient, desk: Desk, put: Callable[[RunState], None], state: RunState) -> None:
    put(state)
    response = client.delete("/v1/runs/demo")
    if state in (RunState.STOPPED, RunState.FAILED, RunState.SUCCEEDED):
        assert response.status_code == 204
        assert_problem(client.get("/v1/runs/demo"), 404, "RUN_UNKNOWN")
        assert desk.run()["directory"] == "demo.2", "old files are not taken for those of the new run"
    else:
        assert assert_problem(response, 409, "TRANSITION_ILLEGAL")["current_state"] == state


def test_long_names_still_get_a_directory_of_their_own(client: TestClient, desk: Desk) -> None:
    name = "x" * 63
    for directory in (name, "x" * 61 + ".2", "x" * 61 + ".3"):
        assert desk.run(name)["directory"] == directory
        desk.verb("stop", name)
        assert client.delete(f"/v1/runs/{name}").status_code == 204


def test_only_note_and_target_change(client: TestClient, desk: Desk) -> None:
    desk.run()
    desk.target("other")
    changed = client.patch("/v1/runs/demo", json={"note": "baseline", "target": "other"}).json()
    assert (changed["note"], changed["target"]) == ("baseline", "other")
    assert_problem(client.patch("/v1/runs/demo", json={"spec": SPEC}), 422, "REQUEST_INVALID")
    assert_problem(client.patch("/v1/runs/demo", json={"target": "third"}), 404, "TARGET_UNKNOWN")
    assert_problem(client.patch("/v1/runs/none", json={}), 404, "RUN_UNKNOWN")


def test_the_target_of_a_running_run_stays(client: TestClient, desk: Desk, put: Callable[[RunState], None]) -> None:
    put(RunState.RUNNING)
    assert_problem(client.patch("/v1/runs/demo", json={"target": "local"}), 409, "TRANSITION_ILLEGAL")
    assert client.patch("/v1/runs/demo", json={"note": "x"}).json()["note"] == "x"


def test_the_same_key_gives_the_same_answer(client: TestClient, desk: Desk) -> None:
    key = {"Idempotency-Key": "abc"}
    body = {"target": "local", "spec": SPEC}
    first = client.post("/v1/runs", json=body, headers=key)
    desk.verb("stop")
    again = client.post("/v1/runs", json=body, headers=key)
    assert (again.status_code, again.content) == (201, first.content)
    assert again.headers["idempotency-replayed"] == "true"
    assert_problem(client.post("/v1/runs", json=body | {"note": "x"}, headers=key), 422, "IDEMPOTENCY_KEY_REUSED")
    assert_problem(client.post("/v1/runs/demo:resume", headers=key), 422, "IDEMPOTENCY_KEY_REUSED")


def test_the_same_request_at_the_same_time(client: TestClient, desk: Desk) -> None:
    body = {"target": "local", "spec": SPEC}

    def create(_number: int) -> tuple[int, bytes]:
        response = client.post("/v1/runs", json=body, headers={"Idempotency-Key": "abc"})
        return response.status_code, response.content

    with ThreadPoolExecutor(8) as pool:
        answers = set(pool.map(create, range(16)))
    assert [status for status, _ in answers] == [201]
    assert len(desk.get("runs")["runs"]) == 1


def test_a_repeated_verb_with_a_key_does_nothing_twice(client: TestClient, desk: Desk) -> None:
    desk.run()
    key = {"Idempotency-Key": "stop-1"}
    assert client.post("/v1/runs/demo:stop", headers=key).json()["state"] == "STOPPED"
    desk.verb("resume")
    assert client.post("/v1/runs/demo:stop", headers=key).json()["state"] == "STOPPED", "the first answer"
    assert desk.state() == "STARTING", "and no second stop"


def test_refusals_and_old_answers_are_not_remembered(client: TestClient, desk: Desk) -> None:
    key = {"Idempotency-Key": "k"}
    assert_problem(client.post("/v1/runs/demo:stop", headers=key), 404, "RUN_UNKNOWN")
    desk.run()
    assert client.post("/v1/runs/demo:stop", headers=key).json()["state"] == "STOPPED"
    desk.clock.jump(24 * 3600 + 1)
    desk.reconcile()
    desk.verb("resume")
    assert client.post("/v1/runs/demo:stop", headers=key).json()["state"] == "STOPPING"


@pytest.mark.parametrize("key", ["", "x" * 256, "a b"])
def test_keys_are_checked(client: TestClient, key: str) -> None:
    response = client.post("/v1/runs/demo:stop", headers={"Idempotency-Key": key})
    assert_problem(response, 422, "REQUEST_INVALID")


@pytest.mark.parametrize("path", ["", "/checkpoints", "/metrics", "/events", "/events:stream", "/logs", "/logs:stream"])
def test_nothing_is_known_of_an_unknown_run(client: TestClient, path: str) -> None:
    assert_problem(client.get(f"/v1/runs/none{path}"), 404, "RUN_UNKNOWN")


@pytest.mark.parametrize("cursor", ["x", "1", "1-2-3", "-1-2", "1-" + "9" * 40])
def test_cursors_that_we_never_gave(client: TestClient, desk: Desk, cursor: str) -> None:
    desk.run()
    assert_problem(client.get("/v1/runs/demo/events:stream", params={"cursor": cursor}), 422, "REQUEST_INVALID")
