"""Who an agent is, and which device it has."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from drafter_trainer.agent.devices import TrainerDevice, choose_device, find_device
from drafter_trainer.agent.identity import check_name, default_name, open_state, storage_id
from slipstream.errors import SlipstreamError
from slipstream.machine_probe import GpuFacts, TorchFacts, memory_bytes
from slipstream.run_spec.reasons import Reason

GPUS = tuple(
    GpuFacts(name=f"gpu {n}", memory_bytes=n, compute_capability=(9, 0), shared_memory_per_block_bytes=None)
    for n in range(2)
)


def test_an_agent_that_is_started_again_is_the_same(tmp_path: Path) -> None:
    first = open_state(tmp_path / "state")
    first.lock.close()
    with open_state(tmp_path / "state").lock:
        pass
    again = open_state(tmp_path / "state")
    assert again.instance_id == first.instance_id
    again.lock.close()
    with open_state(tmp_path / "other").lock as _:
        pass
    assert (tmp_path / "other" / "instance-id").read_text() != (tmp_path / "state" / "instance-id").read_text()


def test_one_agent_at_a_time(tmp_path: Path) -> None:
    with open_state(tmp_path).lock, pytest.raises(SlipstreamError, match="Another agent has") as caught:
        open_state(tmp_path)
    assert caught.value.remedy


def test_agents_that_share_a_directory_share_its_storage_id(tmp_path: Path) -> None:
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(storage_id(tmp_path / "runs"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(found)) == 1
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [".storage-id"]


def test_a_damaged_id_is_named(tmp_path: Path) -> None:
    (tmp_path / ".storage-id").write_text("")
    with pytest.raises(SlipstreamError, match=r"storage-id is damaged"):
        storage_id(tmp_path)


@pytest.mark.parametrize(("make", "flag"), [(open_state, "--state"), (storage_id, "--runs")])
def test_a_directory_that_cannot_be_made_names_the_flag(
    tmp_path: Path, make: Callable[[Path], object], flag: str
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SlipstreamError, match="could not be written") as caught:
        make(tmp_path / "file" / "below")
    assert flag in caught.value.remedy


@pytest.mark.parametrize("device", ["auto", "cuda:5"])
def test_default_names_are_names(device: str) -> None:
    assert check_name(default_name(device)).endswith("-cuda5") == (device == "cuda:5")


@pytest.mark.parametrize("name", ["", "Big", "a b", "-a", "a" * 64, "a/b", "\u00e9"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(SlipstreamError, match="--name is"):
        check_name(name)


@pytest.mark.parametrize("choice", ["gpu", "cuda:x", "cpu:0", "auto:1", ""])
def test_devices_that_are_none(choice: str) -> None:
    with pytest.raises(SlipstreamError, match="--device is"):
        find_device(choice)


def test_a_cpu_is_not_looked_for() -> None:
    assert find_device("cpu").as_json()["kind"] == "cpu"
    assert find_device("cpu").environment({"CUDA_VISIBLE_DEVICES": "0"}) == {"CUDA_VISIBLE_DEVICES": ""}


def test_gpus_by_what_torch_sees() -> None:
    facts = TorchFacts(gpus=GPUS)
    host = memory_bytes()[0]
    assert choose_device("auto", 0, facts) == TrainerDevice("cuda", 0, "gpu 0", 0, (9, 0), host)
    registered = {"kind": "cuda", "index": 1, "name": "gpu 1", "memory_bytes": 1}
    for_placement = {"compute_capability": (9, 0), "host_memory_bytes": host}
    assert choose_device("cuda", 1, facts).as_json() == registered | for_placement
    assert choose_device("auto", 0, TorchFacts()) == TrainerDevice("cpu", memory_bytes=memory_bytes()[0]), "for a plan"
    refusals = [("cuda", 2, facts), ("cuda", 0, TorchFacts()), ("auto", 0, TorchFacts(problem="torch is broken"))]
    for kind, index, seen in refusals:
        with pytest.raises(SlipstreamError) as caught:
            choose_device(kind, index, seen)
        assert caught.value.reason is Reason.ENVIRONMENT_UNSUPPORTED and caught.value.remedy


def test_a_gpu_is_a_number_among_those_that_may_be_seen() -> None:
    gpu = TrainerDevice("cuda", 1)
    assert gpu.environment({}) == {"CUDA_VISIBLE_DEVICES": "1"}
    assert gpu.environment({"CUDA_VISIBLE_DEVICES": "5, 7"}) == {"CUDA_VISIBLE_DEVICES": "7"}
    assert gpu.environment({"CUDA_VISIBLE_DEVICES": "GPU-aa,GPU-bb"}) == {"CUDA_VISIBLE_DEVICES": "GPU-bb"}
