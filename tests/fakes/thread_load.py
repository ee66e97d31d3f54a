"""Four threads call one compiled attention behind the tripwire; `python -m tests.fakes.thread_load DEVICE MODE...`.

MODE: `held`, another thread keeps an FX trace open meanwhile, which torch sees, before it looks into its cache, as it
sees one of a compilation; `lenient`, the same with `error_on_nested_fx_trace=False`; `race`, all first calls at once,
of a function that nobody has warmed up; `owned`, the trainer's own kind of function.

Prints a line of JSON per mode: how many calls ended how. `right`, `dense` (the tripwire refused it), `wrong`, or the
name of an exception. On CUDA a call has its backward; on a CPU torch has none.
"""

import functools
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from drafter_trainer import flex_policy
from drafter_trainer.anchors import Anchors
from drafter_trainer.block_mask import AttentionLayout, build_block_attention
from slipstream.compile_guards import torch_release
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason

THREADS, CALLS = 4, 25
CONTEXT, BLOCK, HEADS, HEAD_DIM = 256, 16, 2, 64
DEADLINE = 120.0

TRACES_ARE_SEEN = (torch_release(torch.__version__) or (0, 0)) < (2, 14)
"""Whether a thread meets the FX trace of another; later, it is a thread's own, and every call is right."""

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def case(device: torch.device) -> tuple[Attention, list[Tensor], Tensor]:
    """An attention of a few blocks, its inputs, and what SDPA gives for them."""
    anchors = Anchors(torch.tensor([3, 90, 200, 0]), torch.tensor([True, True, True, False])).to(device)
    positions = torch.arange(CONTEXT, device=device)
    rows = len(anchors.valid) * BLOCK
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(HEADS, length, HEAD_DIM, generator=generator).to(device)
        for length in (rows, CONTEXT + rows, CONTEXT + rows)
    ]
    inputs = [tensor.requires_grad_(device.type == "cuda") for tensor in inputs]
    kinds = [build_block_attention(AttentionLayout(kind, BLOCK), anchors, positions) for kind in ("flex", "sdpa")]
    expected = kinds[1](*inputs, sliding=False).detach()
    return functools.partial(kinds[0], sliding=False), inputs, expected


def outcome_of(compiled: Attention, inputs: list[Tensor], expected: Tensor) -> str:
    """One call, in a word."""
    try:
        output = compiled(*inputs)
        gradients = torch.autograd.grad(output.sum(), inputs) if output.requires_grad else ()
        right = torch.allclose(output, expected, atol=1e-3) and all(torch.isfinite(one).all() for one in gradients)
    except SlipstreamError as error:
        return "dense" if error.reason is Reason.DENSE_ATTENTION else error.reason.value
    except Exception as error:  # noqa: BLE001 - whatever torch raises is an outcome
        return type(error).__name__
    return "right" if right else "wrong"


def in_four_threads(device: torch.device, call: Callable[[], str], *, lenient: bool) -> Counter[str]:
    """Outcomes of all calls of all threads, which begin together."""
    outcomes: Counter[str] = Counter()
    begin, lock = threading.Barrier(THREADS), threading.Lock()

    def work() -> None:
        # Both are a thread's own: the current device, and since torch 2.12 the configuration.
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if lenient:
            torch._dynamo.config.error_on_nested_fx_trace = False
        begin.wait(DEADLINE)
        for _ in range(CALLS):
            word = call()
            with lock:
                outcomes[word] += 1

    threads = [threading.Thread(target=work, daemon=True) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert sum(outcomes.values()) == THREADS * CALLS, f"threads ended early: {outcomes}"
    return outcomes


@contextmanager
def open_trace() -> Iterator[None]:
    """Another thread is inside an FX trace until the block is left."""
    inside, leave = threading.Event(), threading.Event()

    def traced(values: Tensor) -> Tensor:
        inside.set()
        leave.wait(DEADLINE)
        return values

    thread = threading.Thread(target=torch.fx.symbolic_trace, args=(traced,), daemon=True)
    thread.start()
    assert inside.wait(DEADLINE)
    try:
        yield
    finally:
        leave.set()
        thread.join(DEADLINE)


def main(device: torch.device, mode: str) -> dict[str, dict[str, int]]:
    """Outcomes before, while the load lasts, and of the same calls one after the other when it is over."""
    attention, inputs, expected = case(device)
    if mode == "owned":
        compiled = flex_policy.compile_owned(attention, name="attention", graphs=1)
    else:
        compiled = torch.compile(attention, fullgraph=True, dynamic=False)
    call = functools.partial(outcome_of, compiled, inputs, expected)
    before = Counter() if mode == "race" else Counter([call()])
    with open_trace() if mode in ("held", "lenient") else nullcontext():
        during = in_four_threads(device, call, lenient=mode == "lenient")
    # Before torch 2.12 the configuration is the process's.
    torch._dynamo.config.error_on_nested_fx_trace = True
    after = Counter(call() for _ in range(CALLS))
    return {"before": dict(before), "during": dict(during), "after": dict(after)}


if __name__ == "__main__":
    flex_policy.configure_compiler()
    flex_policy.install_tripwire()
    device = torch.device(sys.argv[1], 0) if sys.argv[1] == "cuda" else torch.device(sys.argv[1])
    for mode in sys.argv[2:]:
        sys.stdout.write(json.dumps(main(device, mode)) + "\n")
