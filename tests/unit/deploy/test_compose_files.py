"""The compose files keep their promises on paper: health, users, grace, loopback, GPUs; images name what exists."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import slipstream
from slipstream.run_spec.load import load_recipe
from tests.architecture.sources import ROOT

FILES = ("compose.yaml", "compose.gpu.yaml")
DOCKERFILES = ("deploy/control.Dockerfile", "deploy/torch.Dockerfile")
ONE_SHOT = {"token"}


def document(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))
    return loaded


def services(name: str) -> dict[str, dict[str, Any]]:
    """Every service, with what it extends merged below it as compose does: mappings by key, the command replaced."""
    merged = {}
    for service, own in document(name)["services"].items():
        base: dict[str, Any] = {}
        if "extends" in own:
            base = services(own["extends"]["file"])[own["extends"]["service"]]
        both = base | own
        for key in base.keys() & own.keys():
            if isinstance(base[key], dict):
                both[key] = base[key] | own[key]
        merged[service] = both
    return merged


def long_running(name: str) -> dict[str, dict[str, Any]]:
    return {service: fields for service, fields in services(name).items() if service not in ONE_SHOT}


def seconds(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(s|m|h)", text).groups()  # type: ignore[union-attr]
    return int(number) * {"s": 1, "m": 60, "h": 3600}[unit]


@pytest.mark.parametrize("name", FILES)
def test_every_service_has_a_health_check_of_its_own(name: str) -> None:
    for service, fields in long_running(name).items():
        program, script, kind, whom = fields["healthcheck"]["test"][1:]
        assert (program, script) == ("python", "/opt/slipstream/health.py")
        if kind == "trainer":
            assert f"--name={whom}" in fields["command"], service
        else:
            port = whom.rpartition(":")[2]
            assert f"--listen=0.0.0.0:{port}" in fields["command"], service


@pytest.mark.parametrize("name", FILES)
def test_nobody_has_more_than_it_needs(name: str) -> None:
    for service, fields in services(name).items():
        assert fields["read_only"] is True, service
        assert fields["cap_drop"] == ["ALL"], service
        assert fields["security_opt"] == ["no-new-privileges:true"], service
        assert "privileged" not in fields and "user" not in fields, service
        writes_token = any(volume == "token:/run/slipstream" for volume in fields["volumes"])
        assert writes_token == (service in ONE_SHOT), service


@pytest.mark.parametrize("name", FILES)
def test_only_the_control_api_is_published_and_on_loopback_alone(name: str) -> None:
    published = {service: fields["ports"] for service, fields in services(name).items() if "ports" in fields}
    assert published == {"control-api": ["127.0.0.1:${SLIPSTREAM_PORT:-8080}:8080"]}


@pytest.mark.parametrize("name", FILES)
def test_grace_periods_are_longer_than_what_they_wait_for(name: str) -> None:
    from drafter_trainer.agent.child import LEAVE_SECONDS

    running = long_running(name)
    drain = next(word for word in running["target"]["command"] if word.startswith("--drain-seconds="))
    needed = {"control-api": 5.0, "target": float(drain.partition("=")[2])}
    for service, fields in running.items():
        assert seconds(fields["stop_grace_period"]) >= needed.get(service, LEAVE_SECONDS) + 10, service
        assert fields["restart"] == "unless-stopped"


@pytest.mark.parametrize("name", FILES)
def test_started_in_order_of_readiness(name: str) -> None:
    for service, fields in long_running(name).items():
        conditions = {other: each["condition"] for other, each in fields["depends_on"].items()}
        if service in ("control-api", "target"):
            assert conditions == {"token": "service_completed_successfully"}
        else:
            assert conditions == {"control-api": "service_healthy", "target": "service_healthy"}


@pytest.mark.parametrize("name", FILES)
def test_target_and_trainers_share_bounded_memory(name: str) -> None:
    options = document(name)["volumes"]["shm"]["driver_opts"]
    assert (options["type"], options["device"]) == ("tmpfs", "tmpfs")
    assert re.search(r"\bnr_blocks=\d+\b", options["o"])
    for service, fields in long_running(name).items():
        assert ("shm:/shm" in fields["volumes"]) == (service != "control-api")
    declared = set(document(name)["volumes"])
    for fields in services(name).values():
        mounted = {volume.partition(":")[0] for volume in fields["volumes"]}
        assert {each for each in mounted if not each.startswith(".")} <= declared


def test_every_trainer_of_the_box_has_a_gpu_of_its_own() -> None:
    devices = {
        service: fields["deploy"]["resources"]["reservations"]["devices"]
        for service, fields in long_running("compose.gpu.yaml").items()
        if "deploy" in fields
    }
    ids = {service: each[0]["device_ids"] for service, each in devices.items()}
    assert ids == {
        "target": ["0", "1", "2", "3", "4"],
        "trainer-gpu5": ["5"],
        "trainer-gpu6": ["6"],
        "trainer-gpu7": ["7"],
    }
    assert all(each[0]["capabilities"] == ["gpu"] for each in devices.values())
    engines = ",".join(f"cuda:{number}" for number in range(len(ids["target"])))
    assert f"--devices={engines}" in long_running("compose.gpu.yaml")["target"]["command"]
    states = [
        word
        for fields in long_running("compose.gpu.yaml").values()
        for word in fields["command"]
        if word.startswith("--state=")
    ]
    assert len(set(states)) == len(states) == 3


@pytest.mark.parametrize("name", FILES)
def test_images_recipes_and_files_exist(name: str) -> None:
    for fields in services(name).values():
        assert (ROOT / fields["build"]["context"] / fields["build"]["dockerfile"]).is_file()
    recipe = next(word for word in services(name)["target"]["command"] if word.endswith(".toml"))
    load_recipe(ROOT / Path(recipe).relative_to("/opt/slipstream"), [])


def copied(dockerfile: str) -> list[str]:
    """What a Dockerfile takes from the repository."""
    text = (ROOT / dockerfile).read_text(encoding="utf-8")
    lines = re.findall(r"^COPY (?!--from)(.+)$", text, flags=re.MULTILINE)
    return [source for line in lines for source in line.split()[:-1]]


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_dockerfiles_copy_what_exists_and_is_not_ignored(dockerfile: str) -> None:
    kept = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(encoding="utf-8"), flags=re.MULTILINE)
    for source in copied(dockerfile):
        assert (ROOT / source).exists(), source
        assert source in kept, source
    assert set(kept) == {source for each in DOCKERFILES for source in copied(each)}


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_dockerfiles_end_as_a_user_without_privileges(dockerfile: str) -> None:
    text = (ROOT / dockerfile).read_text(encoding="utf-8")
    last_stage = text[text.rindex("\nFROM ") :]
    assert re.findall(r"^USER (.+)$", last_stage, flags=re.MULTILINE) == ["slipstream"]
    assert "--uid 10001" in last_stage and "--gid 10001" in last_stage
    assert f'org.opencontainers.image.version="{slipstream.__version__}"' in last_stage
    assert text.startswith("#") and "ARG BASE_IMAGE=python:3.12-slim" in text


def test_directories_of_volumes_are_made_with_their_owner() -> None:
    """A new volume takes owner and mode of the directory that it is mounted on; without one it would be root's."""
    made = {
        "control.Dockerfile": "/var/lib/slipstream/control /run/slipstream",
        "torch.Dockerfile": "slipstream/runs slipstream/target",
    }
    for dockerfile, directories in made.items():
        text = " ".join((ROOT / "deploy" / dockerfile).read_text(encoding="utf-8").split())
        assert directories in text.replace(" \\", "")
