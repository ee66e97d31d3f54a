"""The failure of the design that this replaces, on a GPU: threads, a warm-up that proves too little, crowded anchors.

Compiled functions here are the trainer's; each child process has torch's compiler to itself.
"""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from drafter_trainer import flex_policy
from drafter_trainer.anchors import Anchors
from drafter_trainer.block_mask import AttentionLayout, build_block_attention
from tests.fakes.processes import import_path
from tests.fakes.thread_load import TRACES_ARE_SEEN
from tests.gpu.test_flex_drafter import _policy  # noqa: F401 - a fixture, for every test here

CONTEXT, ANCHORS, BLOCK, HEADS, KV_HEADS, HEAD_DIM = 512, 1024, 32, 2, 1, 128


def test_four_threads_are_right_or_refused_and_never_dense() -> None:
    """Forward and backward. A plain compiled function fails wherever its calls meet another thread's trace, which two
    modes hold open; ours belongs to one thread."""
    modes = ("held", "lenient", "owned", "race")
    # A process for each, all at once: what one leaves of the compiler's state is no other's.
    children = {
        mode: subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.thread_load", "cuda", mode],
            env=os.environ | {"PYTHONPATH": import_path()},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for mode in modes
    }
    results = {}
    for mode, child in children.items():
        output, complaints = child.communicate(timeout=400)
        assert child.returncode == 0, (mode, complaints[-3000:])
        results[mode] = json.loads(output.splitlines()[-1])
    sys.stdout.write(f"{results}\n")
    assert all("wrong" not in outcomes for result in results.values() for outcomes in result.values()), results
    assert all(results[mode]["before"] == {"right": 1} for mode in modes if mode != "race"), results
    assert all(results[mode]["after"] == {"right": 25} for mode in ("held", "owned")), results
    if TRACES_ARE_SEEN:
        assert results["held"]["during"] == {"RuntimeError": 100}, "torch refuses"
        # Told not to refuse, torch runs the function uncompiled: what would have gone dense meets the tripwire.
        assert results["lenient"]["during"].keys() - {"right"}, results
    else:
        assert results["held"]["during"] == results["lenient"]["during"] == {"right": 100}, results
    assert results["owned"]["during"] == {"AssertionError": 100}, "the function of another thread"
    # Without a trace held open, threads may miss each other: all right, some refused, but nothing else.
    race = results["race"]["during"]
    assert "dense" not in race, results
    # A warning, because pytest shows it for tests that pass.
    words = ", ".join(f"{count} {outcome}" for outcome, count in race.items())
    warnings.warn(f"first calls of four threads at once, torch {torch.__version__}: {words}", stacklevel=1)


@pytest.mark.parametrize("valid", [ANCHORS, 1, 0], ids=["all valid", "one valid", "none valid"])
def test_crowded_anchors_are_finite_and_equal_to_dense(valid: int, crowded: "Crowded") -> None:
    """1024 blocks of 32 slots over 512 tokens of context: 32,768 queries, 33,280 keys."""
    anchors = crowded.anchors(valid)
    flex, sdpa = (
        build_block_attention(AttentionLayout(kind, BLOCK), anchors, crowded.positions) for kind in ("flex", "sdpa")
    )
    inputs = [tensor.detach().requires_grad_() for tensor in crowded.inputs]
    direction = crowded.direction * anchors.valid.repeat_interleave(BLOCK)[:, None]
    outputs, gradients = [], []
    for call in (lambda *tensors: crowded.compiled(*tensors, flex), lambda *tensors: sdpa(*tensors, sliding=False)):
        output = call(*inputs)
        outputs.append(output.detach())
        gradients.append(torch.autograd.grad(output, inputs, direction))
        assert all(torch.isfinite(result).all() for result in (outputs[-1], *gradients[-1]))
    rows = anchors.valid.repeat_interleave(BLOCK)
    for ours, dense in zip((outputs[0][:, rows], *gradients[0]), (outputs[1][:, rows], *gradients[1]), strict=True):
        error = (ours.float() - dense.float()).norm()
        assert error <= 0.02 * dense.float().norm(), (error.item(), dense.float().norm().item())
        assert valid or not ours.any()


@dataclass(frozen=True)
class Crowded:
    """One compiled function and one set of inputs for all cases: new anchors cost no graph."""

    compiled: Callable[..., torch.Tensor]
    positions: torch.Tensor
    inputs: list[torch.Tensor]
    direction: torch.Tensor

    def anchors(self, valid: int) -> Anchors:
        numbers = torch.arange(ANCHORS, device="cuda")
        positions = torch.where(numbers < valid, numbers * CONTEXT // ANCHORS, 0)
        return Anchors(positions, numbers < valid)


@pytest.fixture
def crowded() -> Crowded:
    if torch.cuda.get_device_properties(0).total_memory < 80 << 30:
        pytest.skip("the dense reference of this size needs 60 GB")
    generator = torch.Generator("cuda").manual_seed(0)
    rows = ANCHORS * BLOCK
    shapes = ((HEADS, rows), (KV_HEADS, CONTEXT + rows), (KV_HEADS, CONTEXT + rows), (HEADS, rows))
    query, key, value, direction = (
        torch.randn(*shape, HEAD_DIM, generator=generator, device="cuda").bfloat16() for shape in shapes
    )
    compiled = flex_policy.compile_owned(
        lambda query, key, value, attention: attention(query, key, value, False), name="crowded", graphs=1
    )
    return Crowded(compiled, torch.arange(CONTEXT, device="cuda"), [query, key, value], direction)
