"""CUDA graphs: what a function launches, recorded once and from then on launched as one. For steps bound by launches.

A recorded function computes on the memory that it was recorded with: inputs are copied there, the output is overwritten
by the next call. It must wait for nothing on the host, and read nothing there that changes.

Nothing else in a trainer touches that memory. The warm-up records every function, before the feeder starts. Replays,
the copies of their inputs and outputs, noise and learning rate all go to the computing stream, in the order of the
calls. A pack's memory is reused once that stream has read it (`DeviceCopy.hand_over`); a checkpoint's copies wait for
the step before them, and the next replay for the copies (`HostCopy.take`). Weights and state are changed in place.
"""

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.plan.sizes import MOST_RECORDED_PARAMETERS
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import RunSpec
from slipstream.telemetry.logs import log_event

Inputs = Mapping[str, Tensor]
Function = Callable[[Inputs], Tensor]
_Pool = Any  # torch names the type differently from version to version

RUNS_BEFORE_RECORDING = 3
"""What is compiled or tuned at a first call must be done by then; the warm-up runs every function more often."""

_log = logging.getLogger(__name__)


class Recorder:
    """Runs functions; once a function ran a few times, records it and replays the record instead."""

    def __init__(self, enabled: bool) -> None:
        """`enabled`: False runs everything as it is. One thread uses it, the one that computes."""
        self.enabled = enabled
        self._runs: Counter[Hashable] = Counter()
        self._recorded: dict[Hashable, _Recorded] = {}
        # One pool for all: memory that one function no longer needs serves the next.
        self._pool = torch.cuda.graph_pool_handle() if enabled else None

    @property
    def recorded(self) -> tuple[Hashable, ...]:
        """Keys of what is replayed by now."""
        return tuple(self._recorded)

    def __call__(self, key: Hashable, function: Function, inputs: Inputs) -> Tensor:
        """The function's result for these inputs.

        Args:
            key: of the function and of the shapes of its inputs; always the same function for the same key.
            function: reads nothing but its inputs and memory that stays where it is.
            inputs: device tensors.

        Raises:
            SlipstreamError: ENVIRONMENT_UNSUPPORTED, the function cannot be recorded here. That ends the run: after a
                recording that failed, torch's allocator gives memory of other streams back no more.
        """
        if not self.enabled:
            return function(inputs)
        if key not in self._recorded:
            if self._runs[key] < RUNS_BEFORE_RECORDING:
                self._runs[key] += 1
                return function(inputs)
            self._recorded[key] = _Recorded(key, function, inputs, self._pool)
        return self._recorded[key].replay(inputs)


class _Recorded:
    """One function at one shape."""

    def __init__(self, key: Hashable, function: Function, inputs: Inputs, pool: _Pool) -> None:
        self._inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        self._graph = torch.cuda.CUDAGraph()
        try:
            # Recording forbids this thread what would make it wait; a feeder's copies in another one may go on.
            with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
                self._output = function(self._inputs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise SlipstreamError(
                f"The training step ({key}) cannot be recorded as a CUDA graph: {error}",
                reason=Reason.ENVIRONMENT_UNSUPPORTED,
                remedy="Set train.cuda_graphs = false; every kernel is then launched by itself.",
            ) from error
        log_event(_log, "info", "step_recorded", part=str(key), reserved_mib=torch.cuda.memory_reserved() >> 20)

    def replay(self, inputs: Inputs) -> Tensor:
        for name, tensor in inputs.items():
            self._inputs[name].copy_(tensor)
        self._graph.replay()
        # Out of the graph's memory: another graph of the pool, or the next replay, overwrites it.
        return self._output.clone()


def wants_graphs(spec: RunSpec, device: torch.device, num_parameters: int) -> tuple[bool, str]:
    """Whether the step of this run is recorded, and why, in words.

    Raises:
        SlipstreamError: SPEC_INVALID, `train.cuda_graphs` is true where a step cannot be recorded.
    """
    setting = spec.train.cuda_graphs
    if setting is False:
        return False, "train.cuda_graphs is false"
    if device.type != "cuda":
        if setting is True:
            raise SlipstreamError(
                f"train.cuda_graphs is true, but the device is {device.type}.",
                reason=Reason.SPEC_INVALID,
                remedy='Set train.cuda_graphs = false, or "auto".',
            )
        return False, f"the device is {device.type}"
    if setting is True:
        return True, "train.cuda_graphs is true"
    size = f"{num_parameters / 1e6:.0f} million parameters"
    if num_parameters > MOST_RECORDED_PARAMETERS:
        return False, f"{size}: computing takes longer than launching"
    return True, f"{size}: launching takes longer than computing"
