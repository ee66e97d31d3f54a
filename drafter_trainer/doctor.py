"""`drafter-trainer doctor`: the trainer's policy by itself, on the GPU that this process sees.

Environment checks, the tripwire and its self-test, compiled attention forward and backward: all that a trainer does at
start before it knows its run. Run by `slipstream doctor` in its own process, for it loads torch and changes it.
"""

import json
import sys
import time
from typing import Any

import torch

from drafter_trainer.device_failures import Phase, failures_reported, unknown_torch
from slipstream.errors import SlipstreamError

Answer = dict[str, Any]
_CANNOT = 4


def examine() -> Answer:
    """Fields of `machine_probe.PolicyFacts`."""
    if not torch.cuda.is_available():
        return {
            "problem": "torch sees no CUDA device",
            "remedy": "Nothing to do where a CPU is meant: it trains by SDPA. `slipstream doctor` says more.",
        }
    try:
        seconds = _seconds_of_self_test(torch.device("cuda", 0))
    except SlipstreamError as error:
        return {"problem": error.message, "remedy": error.remedy}
    return {
        "passed": (
            "environment: nothing lets compiled attention run dense",
            "tripwire: an uncompiled call is refused",
            f"compiled attention, forward and backward in bfloat16: finite ({seconds:.1f} s with its compilation)",
        )
    }


def _seconds_of_self_test(device: torch.device) -> float:
    try:
        from drafter_trainer.flex_policy import check_environment, configure_compiler, install_tripwire, self_test
    except (ImportError, AttributeError) as error:
        raise unknown_torch(error) from error
    check_environment(device)
    with failures_reported(Phase.SELF_TEST):
        torch.cuda.set_device(device)
        configure_compiler()
        install_tripwire()
        began = time.monotonic()
        self_test(device)
        return time.monotonic() - began


def in_words(answer: Answer) -> str:
    """The answer for people: what has passed, or the problem with its remedy."""
    if "problem" in answer:
        return f"problem: {answer['problem']}\n  remedy: {answer['remedy']}\n"
    return "".join(f"{line}\n" for line in answer["passed"]) + "A trainer can train on this GPU.\n"


def print_examination(*, as_json: bool) -> int:
    """The exit status: 4, that of a machine that cannot, where there is a problem."""
    answer = examine()
    sys.stdout.write(json.dumps(answer) + "\n" if as_json else in_words(answer))
    return _CANNOT if "problem" in answer else 0
