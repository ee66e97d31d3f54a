"""A device whose memory is full, for real: what is said, and that the process goes on."""

import pytest
import torch

from drafter_trainer.device_failures import Phase, failures_reported
from drafter_trainer.memory import MemoryReport
from drafter_trainer.warmup import warm_up
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from tests.gpu.real_step import TARGET, VOCABULARY, real_plan, real_spec, real_step
from tests.gpu.test_flex_drafter import _policy  # noqa: F401 - a fixture, for every test here

MIB = 1 << 20


def test_a_full_device_is_named_with_what_was_predicted_and_measured() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    spec = real_spec()
    memory = MemoryReport(spec, TARGET, device)
    total = torch.cuda.get_device_properties(device).total_memory
    try:
        with pytest.raises(SlipstreamError) as caught, memory.shortage_explained():
            step, plan = real_step(spec), real_plan(spec)
            memory.note("drafter and optimizer")
            torch.cuda.empty_cache()
            # The allocator's own limit: the rest of the card stays free for other programs.
            torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + 4 * MIB) / total, device)
            with failures_reported(Phase.WARM_UP, plan.tensor_shapes):
                warm_up(step, plan, torch.bfloat16, vocab_size=VOCABULARY)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    said = f"{caught.value.message} {caught.value.remedy}"
    assert caught.value.reason is Reason.OUT_OF_MEMORY
    for words in ("full while warming up", "Predicted: at most", "drafter and optimizer", "MiB reserved"):
        assert words in said, said
    assert "--set" in said or "No setting" in said, said
    # Nothing of it is left in the way of what comes next.
    assert torch.ones(64 * MIB, device=device).sum().item() == 64 * MIB
