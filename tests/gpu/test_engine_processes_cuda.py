"""Engine processes on GPUs: what they write into the server's page-locked slots is what transformers computes."""

from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.wire.channel import TargetClient
from tests.fakes.plain_trainer import Tensors, Trainer
from tests.fakes.processes import Processes
from tests.fakes.served_model import LAYERS, data_spec_json, write_conversations, write_tiny_target
from tests.unit.target_model.document_alone import layer_outputs, load_reference


def assert_near_transformers(model: Path, pack: Tensors) -> None:
    """Each document alone, in float32 on the CPU; as near as bfloat16 is."""
    reference = load_reference(model)
    documents = pack["document_ids"][pack["document_ids"] >= 0]
    for begin, end in pairwise((0, *accumulate(torch.bincount(documents.long()).tolist()))):
        expected = layer_outputs(reference, pack["input_ids"][begin:end].numpy().astype(np.int32))
        for layer in LAYERS:
            ours = pack[f"hidden_states.{layer}"][begin:end].float()
            assert (ours - expected[layer]).abs().max() <= 0.04 * expected[layer].abs().max()


@pytest.mark.parametrize(
    "flags, gpus",
    [
        (("--devices", "cuda:0"), 1),
        (("--devices", "cuda:0,cuda:1"), 2),
        (("--devices", "cuda:0,cuda:1", "--tensor-parallel", "2"), 2),
    ],
    ids=["one", "two", "two ranks"],
)
def test_engines(flags: tuple[str, ...], gpus: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    model = write_tiny_target(tmp_path / "model")
    data = data_spec_json(write_conversations(tmp_path / "conversations.jsonl"))
    processes = Processes()
    try:
        files = ("--model", model, "--ledger", tmp_path / "ledger.sqlite", "--probe-bytes", "1MiB")
        server, address = processes.start_target_server(*files, "--shelf-bytes", "2MiB", *flags, timeout=240)
        with TargetClient(address) as client:
            run = Trainer(client, "run", data)
            total = run.join().total_packs
            run.train()
        assert sorted(run.packs) == list(range(total))
        assert "memory_not_page_locked" not in server.output
        for number in (0, 1, total - 1):
            assert_near_transformers(model, run.packs[number])
        server.terminate()
        assert server.wait_exit(timeout=60) == 0
    finally:
        processes.close()
