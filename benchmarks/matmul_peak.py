"""The matmul peak that this GPU reaches now: 8192 x 8192 x 8192 in bf16 on random data."""

import itertools
import statistics

import torch

EDGE = 8192
REPETITIONS = 30
_WARM_UP = 10


def matmul_peak(device: torch.device) -> float:
    """Median TFLOP/s; random data, because zeros need less power and run faster."""
    left, right = (torch.randn(EDGE, EDGE, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPETITIONS + 1)]
    for _ in range(_WARM_UP):
        torch.mm(left, right, out=out)
    events[0].record()
    for event in events[1:]:
        torch.mm(left, right, out=out)
        event.record()
    torch.cuda.synchronize(device)
    seconds = [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]
    return 2 * EDGE**3 / statistics.median(seconds) / 1e12
