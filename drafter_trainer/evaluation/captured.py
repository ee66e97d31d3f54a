"""A function over tensors that stay where they are, captured as a CUDA graph: one launch instead of hundreds."""

from collections.abc import Callable

import torch

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason

_WARM_UP_CALLS = 3
"""Kernels choose their algorithm and take their workspace in the first calls, which a capture does not allow."""


def captured(function: Callable[[], None]) -> Callable[[], None]:
    """Capture `function` on the current CUDA device; the result replays it.

    Args:
        function: reads and writes only tensors that outlive it; is called several times here.

    Raises:
        SlipstreamError: ENVIRONMENT_UNSUPPORTED, it does something that a graph cannot hold (it waits for the device,
            say), or there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise SlipstreamError(
            "CUDA graphs need a CUDA device, torch finds none",
            reason=Reason.ENVIRONMENT_UNSUPPORTED,
            remedy="Decode with --no-graphs.",
        )
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(_WARM_UP_CALLS):
            function()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            function()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise SlipstreamError(
            f"a round of decoding cannot be captured as a CUDA graph: {str(error).splitlines()[0]}",
            reason=Reason.ENVIRONMENT_UNSUPPORTED,
            remedy="Decode with --no-graphs; the target's forward waits for the GPU or allocates in its own way.",
        ) from error
    return graph.replay
