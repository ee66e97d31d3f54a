"""`python -m slipstream.torch_facts`: prints as JSON what torch sees here. Run by `machine_probe`, in its own process.

Whoever asks may be torch-free, and a driver that crashes or hangs takes only this process with it. Nothing is
allocated on a device.
"""

import json
import sys
import warnings
from typing import Any


def gather() -> dict[str, Any]:
    """Fields of `machine_probe.TorchFacts`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import torch

        cuda_available = torch.cuda.is_available()
        gpus = [_gpu(torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count() * cuda_available)]
    return {
        "version": torch.__version__,
        "cuda_build": torch.version.cuda,
        "gpus": gpus,
        # Torch explains an unusable driver in a warning.
        "warnings": [
            str(warning.message).split("\n")[0] for warning in caught if "cuda" in str(warning.message).lower()
        ],
    }


def _gpu(properties: Any) -> dict[str, Any]:
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "compute_capability": (properties.major, properties.minor),
        # What a kernel may opt in to decides which tiles fit; older builds of torch do not tell.
        "shared_memory_per_block_bytes": getattr(properties, "shared_memory_per_block_optin", None),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(gather()) + "\n")
