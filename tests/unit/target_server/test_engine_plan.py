"""Which engines the flags ask for, what is refused in words, and what travels between server and engine."""

import argparse
import socket
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.engine_devices import check_present
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import TargetSpec
from slipstream.target_files import TargetFiles, locate_target
from slipstream.tensor_parallel import check_divisible
from slipstream.wire.arena import PayloadArena
from slipstream.wire.codec import plan_layout, view_tensor, write_tensor
from target_server.cli import plan_engines, run_command
from target_server.engine_arena import MappedArena, layout_fields, read_layout, repair, segment_of
from target_server.engine_line import EngineLine, Message
from target_server.engine_plan import EnginePlan
from target_server.engine_process import pack_message, read_pack
from target_server.engine_ranks import _environment
from target_server.packing import PackSequence
from target_server.suspects import Suspects
from tests.fakes.tiny_models import save_tiny_model
from tests.fakes.tiny_tokenizer import build_tiny_tokenizer


def flags(devices: str | None, tensor_parallel: int = 1, no_shm: bool = False) -> argparse.Namespace:
    return argparse.Namespace(
        devices=devices, tensor_parallel=tensor_parallel, no_shm=no_shm, threads=None, log_level="info", log_json=False
    )


def plan(devices: str, tensor_parallel: int = 1, cores: int = 16) -> EnginePlan:
    made = plan_engines(flags(devices, tensor_parallel), cores)
    assert made is not None
    return made


def test_an_engine_for_each_device_or_for_each_group_of_them() -> None:
    assert plan_engines(flags(None), 16) is None, "the engine is a thread"
    assert plan("cuda:0,cuda:1, cuda:2").devices == (("cuda:0",), ("cuda:1",), ("cuda:2",))
    assert plan("cpu").devices == (("cpu",),), "asked for by name: a process"
    split = plan("cuda:0,cuda:1,cuda:2,cuda:3", 2)
    assert split.devices == (("cuda:0", "cuda:1"), ("cuda:2", "cuda:3"))
    assert (split.ranks, split.in_words()) == (2, "cuda:0+cuda:1,cuda:2+cuda:3")


def test_engines_on_a_cpu_share_its_cores() -> None:
    assert plan("cpu,cpu,cpu", cores=16).threads == 5
    assert plan("cpu,cpu,cpu", cores=2).threads == 1
    assert plan("cuda:0,cuda:1").threads is None


@pytest.mark.parametrize(
    "given, words",
    [
        (flags("cuda"), "--devices names 'cuda'"),
        (flags("cuda:0,,cuda:1"), "--devices names ''"),
        (flags("cpu,cuda:0"), "names GPUs and CPUs"),
        (flags("cuda:1,cuda:0,cuda:1"), "names cuda:1 more than once"),
        (flags("cuda:0,cuda:1,cuda:2", 2), "names 3 devices, which engines of 2 cannot share"),
        (flags(None, 2), "--tensor-parallel 2 needs to know which devices"),
        (flags("cpu,cpu", no_shm=True), "--devices and --no-shm exclude each other"),
    ],
)
def test_flags_that_make_no_engines(given: argparse.Namespace, words: str) -> None:
    with pytest.raises(SlipstreamError, match=words) as caught:
        plan_engines(given, 16)
    assert caught.value.reason is Reason.SPEC_INVALID
    assert caught.value.remedy


def test_gpus_that_are_not_there() -> None:
    check_present(["cuda:0", "cuda:1"], 2)
    check_present(["cpu"], 0)
    for count, words in ((0, "no GPU"), (1, "1 GPU"), (2, "2 GPUs")):
        with pytest.raises(SlipstreamError, match=f"names cuda:2, but torch sees {words}") as caught:
            check_present(["cuda:2"], count)
        assert caught.value.reason is Reason.ENVIRONMENT_UNSUPPORTED


def test_device_and_devices_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_command(["serve", "--model", "m", "--device", "cpu", "--devices", "cpu,cpu"])
    assert "not allowed with" in capsys.readouterr().err


def test_a_process_sees_its_own_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert _environment("cuda:3") == {"CUDA_VISIBLE_DEVICES": "3"}
    assert _environment("cpu") == {"CUDA_VISIBLE_DEVICES": ""}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    assert _environment("cuda:2") == {"CUDA_VISIBLE_DEVICES": "7"}


def saved(directory: Path, family: str = "llama", **sizes: object) -> TargetFiles:
    build_tiny_tokenizer(directory, "chatml", vocab_size=384)
    save_tiny_model(directory, family, vocab_size=384, num_layers=1, **sizes)  # type: ignore[arg-type]
    return locate_target(TargetSpec(model=str(directory)))


def test_models_that_ranks_can_share(tmp_path: Path) -> None:
    spec = TargetSpec(model=str(tmp_path))
    files = saved(tmp_path)
    check_divisible(spec, files, 2)
    with pytest.raises(SlipstreamError, match="num_key_value_heads of .* is 2, which 4 devices cannot share") as caught:
        check_divisible(spec, files, 4)
    assert caught.value.reason is Reason.MODEL_INVALID
    with pytest.raises(SlipstreamError, match=r"target.compile is true, but layers that are spread"):
        check_divisible(spec.model_copy(update={"compile": True}), files, 2)
    gguf = TargetFiles(tmp_path, (tmp_path / "m.gguf",), (), None)
    with pytest.raises(SlipstreamError, match="m.gguf is a GGUF file, which transformers does not spread"):
        check_divisible(spec, gguf, 2)


def test_a_model_without_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import LlamaConfig

    files = saved(tmp_path)
    monkeypatch.setattr(LlamaConfig, "base_model_tp_plan", None)
    with pytest.raises(SlipstreamError, match="no plan for spreading llama") as caught:
        check_divisible(TargetSpec(model=str(tmp_path)), files, 2)
    assert caught.value.reason is Reason.MODEL_INVALID


def test_messages_arrive_whole_and_the_end_is_heard() -> None:
    here, there = (EngineLine(each) for each in socket.socketpair())
    blob = bytes(range(256)) * 8192  # more than a socket holds
    sender = threading.Thread(target=here.send, args=(Message("pack", {"number": 7, "names": ["ä"]}, blob),))
    sender.start()
    assert there.receive() == Message("pack", {"number": 7, "names": ["ä"]}, blob)
    sender.join(30)
    here.send(Message("empty"))
    assert there.receive() == Message("empty")
    here.hang_up()
    assert there.receive() is None
    assert here.receive() is None
    for line in (here, there):
        line.close()


def test_a_message_that_breaks_off_is_an_end() -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(b"\x10\x00\x00\x00\x00\x00\x00\x00{")
    ours.close()
    line = EngineLine(theirs)
    assert line.receive() is None
    line.close()


def test_a_pack_is_the_same_on_both_sides() -> None:
    class Documents:
        ids = ("a", "b", "c")
        lengths = np.array([5, 9, 3])

        def __getitem__(self, index: int) -> argparse.Namespace:
            length = int(self.lengths[index])
            return argparse.Namespace(
                token_ids=np.arange(length, dtype=np.int32) + index, loss_mask=np.ones(length, dtype=np.uint8)
            )

    sequence = PackSequence(Documents(), pack_tokens=16, seed=0, window_documents=3)  # type: ignore[arg-type]
    for number in range(3):
        pack = sequence.pack(number)
        fields, blob = pack_message(pack)
        copy = read_pack(fields, blob, 16)
        assert copy.document_names == ()
        for name in ("token_ids", "loss_mask", "document_ids", "position_ids"):
            ours, theirs = getattr(pack, name), getattr(copy, name)
            assert np.array_equal(ours, theirs) and ours.dtype == theirs.dtype and theirs.flags.writeable
        for name in ("sequence_number", "document_lengths", "num_tokens", "num_supervised"):
            assert getattr(pack, name) == getattr(copy, name)


def test_what_an_engine_writes_is_in_the_servers_memory(tmp_path: Path) -> None:
    layout = plan_layout([("a", torch.float32, (3, 2)), ("b", torch.bfloat16, (5,))])
    assert read_layout(layout_fields(layout), layout.size_bytes) == layout
    arena = PayloadArena.create(2, layout.size_bytes, directory=tmp_path)
    mapped = MappedArena(tmp_path / segment_of(arena), for_gpu=False)
    mapped.begin_write(1)
    assert (arena.generation(1), mapped.generation(0)) == (1, 0)
    write_tensor(mapped.slot(1), layout.specs[0], torch.ones(3, 2))
    mapped.end_write(1)
    assert torch.equal(view_tensor(arena.slot(1), layout.specs[0]), torch.ones(3, 2))
    mapped.begin_write(1)
    mapped.close()  # as when it dies
    for _ in range(2):
        repair(arena, 1)
        assert arena.generation(1) == 4, "another content than any reader has seen, and whole for whoever writes next"
    arena.close()


def test_only_a_pack_that_crashed_alone_is_set_aside() -> None:
    suspects, first, second = Suspects(), ("s", 1), ("s", 2)
    assert not suspects.accuse(first, alone=False) and not suspects.accuse(second, alone=False)
    assert suspects.includes(first) and suspects.includes(second)
    suspects.clear(second)
    assert not suspects.includes(second)
    assert suspects.accuse(first, alone=True)
    assert not suspects.accuse(second, alone=True), "once is no proof"
    assert suspects.accuse(second, alone=True)
