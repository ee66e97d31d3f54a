"""`drafter-trainer doctor`: the trainer's policy by itself, on the GPU that this process sees.

Environment checks, the tripwire and its self-test, compiled attention forward and backward: all that a trainer does at
start before it knows its run. Run by `slipstream doctor` in its own process, for it loads torch and changes it.
"""

import json
import sys
from typing import Any

import torch

from drafter_trainer.attention_guard import guard_attention
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
        seconds = guard_attention(torch.device("cuda", 0), shares_cache=False).seconds
    except SlipstreamError as error:
        return {"problem": error.message, "remedy": error.remedy}
    return {
        "passed": (
            "environment: nothing lets compiled attention run dense",
            "tripwire: an uncompiled call is refused",
            f"compiled attention, forward and backward in bfloat16: finite ({seconds:.1f} s with its compilation)",
        )
    }


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
