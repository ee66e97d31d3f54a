"""What fails on the device or in a compiled call is reported where it fails: phase, shapes, guard, versions, memory.

The report goes to the log, and to a file beside the run (`failures/…json`), which outlives the log's rotation.
"""

import errno
import json
import logging
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

import torch

from drafter_trainer.compile_cache import INDUCTOR, SETTING
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.telemetry.logs import log_event

_REPORTED_REASONS = (Reason.DENSE_ATTENTION, Reason.PACK_OUTSIDE_BUCKETS)
_SAME_COMMAND = "then start the same command again: a run that has a checkpoint goes on from it."
_NEW_RUN = "A run that has a checkpoint keeps its settings: give the changed one another name (--set name=…)."

_DRIVERS_WORDS = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")

_log = logging.getLogger(__name__)

_directories: list[Path] = []
"""Where reports are kept, innermost last: one run's, or none."""


@contextmanager
def reports_kept_in(directory: Path) -> Iterator[None]:
    """Within the block every report is written to a file in `directory` too; the directory is made when needed."""
    _directories.append(directory)
    try:
        yield
    finally:
        _directories.pop()


class Phase(StrEnum):
    """What the trainer was doing, in words."""

    SELF_TEST = "trying compiled attention"
    FROZEN_WEIGHTS = "loading the target's frozen weights"
    DRAFTER = "building the drafter and its optimizer"
    WARM_UP = "warming up"
    WEIGHTS = "filling in the drafter's weights"
    PACKS = "taking the packs of a step"
    STEP = "starting a step"
    RESULT = "waiting for a step"
    HELDOUT = "measuring held-out acceptance"
    SAVE = "saving a checkpoint"


_TO_LOWER = {
    Phase.SELF_TEST: "choose another GPU with CUDA_VISIBLE_DEVICES",
    Phase.FROZEN_WEIGHTS: "train in bfloat16 (train.precision), which halves the embedding and the head",
    Phase.DRAFTER: "lower drafter.num_layers or drafter.intermediate_size",
    Phase.PACKS: "lower stream.prefetch_packs or data.pack_tokens",
}
_COMPILING = {Phase.SELF_TEST: "compiled attention", Phase.WARM_UP: "the training step"}
"""Where something is compiled, and what."""
_TO_LOWER_IN_A_STEP = "lower train.anchors_per_pack, data.pack_tokens or loss.chunk_rows"


@contextmanager
def failures_reported(phase: Phase, shapes: Mapping[str, tuple[int, ...]] | None = None) -> Iterator[None]:
    """Log what went wrong in the block with all that a report must hold, then raise it.

    What was refused in words on purpose (SlipstreamError) passes unlogged, unless attention went dense or something
    was compiled after the warm-up.

    Args:
        phase: what the block does.
        shapes: of the pack at hand, by tensor name.

    Raises:
        SlipstreamError: OUT_OF_MEMORY when the device's memory is full, with the phase and what to change;
            PACK_OUTSIDE_BUCKETS when a compiled function met what it was not compiled for; DISK_FULL when there was no
            room for compiled code, ENVIRONMENT_UNSUPPORTED when torch could not compile the step otherwise.
    """
    try:
        yield
    except SlipstreamError as error:
        if error.reason in _REPORTED_REASONS:
            _report(error, phase, shapes)
        raise
    except Exception as error:
        _report(error, phase, shapes)
        if _is_out_of_memory(error):
            raise _out_of_memory(error, phase) from error
        if _is_recompile(error):
            raise _recompile(error, phase, shapes) from error
        if phase in _COMPILING and _is_full_disks(error):
            raise _no_room_to_compile(phase) from error
        if phase in _COMPILING and _is_compilers(error):
            raise _not_compiled(error, phase) from error
        raise


def unknown_torch(error: Exception) -> SlipstreamError:
    """For a torch that lacks what the guards of compiled attention hold on to: the import of `flex_policy` failed."""
    return SlipstreamError(
        f"torch {torch.__version__} is not one that Slipstream can guard compiled attention with: {error}",
        reason=Reason.ENVIRONMENT_UNSUPPORTED,
        remedy="Install a torch release that Slipstream was tested with: 2.11 on GPUs, 2.13 to 2.15 on CPUs.",
    )


def _report(error: Exception, phase: Phase, shapes: Mapping[str, tuple[int, ...]] | None) -> None:
    # Here, because it loads the compiler, which a CPU run has no use for and waits two seconds for.
    from drafter_trainer.flex_policy import describe_failure

    report = {"phase": phase.value, **describe_failure(error, shapes or {})}
    kept = _keep({**report, "traceback": "".join(traceback.format_exception(error))}) if _directories else {}
    log_event(_log, "error", "phase_failed", **report, **kept)


def _keep(report: Mapping[str, str]) -> dict[str, str]:
    """Write the report; returns where it is, or why it is nowhere, for the log."""
    now = time.gmtime()
    path = _directories[-1] / f"{time.strftime('%Y%m%dT%H%M%SZ', now)}-{os.getpid()}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    except OSError as refused:
        return {"report_not_kept": f"{path}: {refused.strerror or refused}"}
    return {"report": str(path)}


def _is_out_of_memory(error: Exception) -> bool:
    """True also for what torch's compiler wraps: a backend that ran out of memory while it tried kernels."""
    inner = getattr(error, "inner_exception", None)
    return any(isinstance(one, torch.OutOfMemoryError) or _is_drivers(one) for one in (error, inner)) or _is_hosts(
        error
    )


def _is_drivers(error: object) -> bool:
    """What torch raises where the driver or cuBLAS, not torch's allocator, found no memory: for a context, a handle, a
    graph. It has no type of its own."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _DRIVERS_WORDS)


def _is_hosts(error: Exception) -> bool:
    """What torch raises where the memory of the CPU is full; it has no type of its own."""
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)


def _out_of_memory(error: Exception, phase: Phase) -> SlipstreamError:
    lower = _TO_LOWER.get(phase, _TO_LOWER_IN_A_STEP)
    if _is_hosts(error):
        return SlipstreamError(
            f"This machine's memory was full while {phase.value}: {str(error).splitlines()[0]}",
            reason=Reason.OUT_OF_MEMORY,
            remedy=f"Stop other programs here, {_SAME_COMMAND} Or {lower}: `slipstream plan` says what fits. "
            f"{_NEW_RUN}",
        )
    return SlipstreamError(
        f"The GPU's memory was full while {phase.value}: {str(error).splitlines()[0]}",
        reason=Reason.OUT_OF_MEMORY,
        remedy=f"Give the target server another GPU or stop other programs on this one, {_SAME_COMMAND} "
        f"Or {lower}. {_NEW_RUN}",
    )


def _is_recompile(error: Exception) -> bool:
    """What torch raises under the stance of the freeze; it has no type of its own."""
    return isinstance(error, RuntimeError) and "fail_on_recompile" in str(error)


def _recompile(error: Exception, phase: Phase, shapes: Mapping[str, tuple[int, ...]] | None) -> SlipstreamError:
    from drafter_trainer.flex_policy import guards_that_failed, shapes_in_words

    guards = "; ".join(guards_that_failed(error)) or "no graph was compiled for it at all"
    return SlipstreamError(
        f"A compiled function met what it was not compiled for while {phase.value}: {guards}. "
        f"The pack: {shapes_in_words(shapes or {}) or 'none'}.",
        reason=Reason.PACK_OUTSIDE_BUCKETS,
        remedy="Nothing was computed uncompiled. Report this with the log; the run can resume from its checkpoint.",
    )


def _is_full_disks(error: Exception) -> bool:
    """Also where a compiling process of torch's met it, of which only the text comes back."""
    return os.strerror(errno.ENOSPC) in str(error) or os.strerror(errno.EDQUOT) in str(error)


def _no_room_to_compile(phase: Phase) -> SlipstreamError:
    cache = os.environ.get(INDUCTOR)
    where = f"the compile cache {cache} or in {tempfile.gettempdir()}" if cache else tempfile.gettempdir()
    return SlipstreamError(
        f"The disk was full while {phase.value}: no room for compiled code in {where}.",
        reason=Reason.DISK_FULL,
        remedy=f"Free some space there, or name another directory with {SETTING} (and TMPDIR), {_SAME_COMMAND}",
    )


def _is_compilers(error: Exception) -> bool:
    """Raised by torch's compiler itself, not by what it compiled. Where it is not loaded, nothing was."""
    exceptions = sys.modules.get("torch._dynamo.exc")
    return exceptions is not None and isinstance(error, exceptions.TorchDynamoException)


def _not_compiled(error: Exception, phase: Phase) -> SlipstreamError:
    inner = getattr(error, "inner_exception", error)
    first = next((line.strip() for line in str(inner).splitlines() if line.strip()), "no message")
    return SlipstreamError(
        f"torch {torch.__version__} could not compile {_COMPILING[phase]} for this machine: "
        f"{type(inner).__name__}: {first}",
        reason=Reason.ENVIRONMENT_UNSUPPORTED,
        remedy="The log names the report with all of it. Install another torch release, or train on another GPU; "
        "slipstream doctor says what is known of this one.",
    )
