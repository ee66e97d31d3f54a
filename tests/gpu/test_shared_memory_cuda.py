"""A GPU reads packs out of the server's segment itself, page-locked in the reader's process."""

from pathlib import Path

import torch

from slipstream.wire.transports import PayloadRef, SharedMemoryReader
from tests.fakes.payload_server import PayloadServer


def test_packs_go_to_the_gpu_without_a_copy_in_host_memory(tmp_path: Path) -> None:
    directory = Path("/dev/shm")
    server = PayloadServer(directory, num_slots=2, slot_bytes=2**22)
    reader = SharedMemoryReader(server.host_id, directory=directory, pin_memory=True)
    sent = {"ids": torch.arange(1000, dtype=torch.int32), "states": torch.randn(512, 1024)}
    for slot in (0, 1, 0):
        sent["states"] += 1
        lease = server.put(slot, sent)
        read = reader.read(PayloadRef.of_lease(lease), ["states", "ids"])
        assert all(tensor.is_pinned() for tensor in read.values())
        moved = {name: tensor.to("cuda", non_blocking=True) for name, tensor in read.items()}
        torch.cuda.synchronize()
        assert all(torch.equal(moved[name].cpu(), sent[name]) for name in sent)
    del read
    reader.close()
    server.close()
    assert torch.zeros(1, device="cuda").item() == 0
