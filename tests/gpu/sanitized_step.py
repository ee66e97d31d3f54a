"""One bucket of the real step under compute-sanitizer: `python -m tests.gpu.sanitized_step [memcheck|racecheck]`.

Starts itself again as `compute-sanitizer --tool memcheck … python -m tests.gpu.sanitized_step --inside`, with torch's
caching allocator off (PYTORCH_NO_CUDA_MEMORY_CACHING=1): in one large cached segment an access beyond a tensor is none
beyond an allocation, and the tool would see nothing. Leaves with 0 where no kernel was at fault, 4 where the tool is
not installed (it comes with the CUDA toolkit, or `pip install nvidia-cuda-sanitizer-api`), else with 1.

Everything is compiled once before, outside, into the compile cache: the tool slows whatever a process does.
"""

import importlib.metadata
import os
import shutil
import subprocess
import sys

from tests.fakes.processes import import_path

SECONDS = 280
_PLACES = (
    "/usr/local/cuda/bin/compute-sanitizer",
    "/usr/local/cuda/compute-sanitizer/compute-sanitizer",
    "/opt/cuda/bin/compute-sanitizer",
)
_WHEEL = "nvidia-cuda-sanitizer-api"
_FAULT = 86
"""What the tool makes of the exit status where it found something."""


def sanitizer() -> str | None:
    """Where the tool is; None where it is not."""
    places = (*_PLACES, *_places_of_wheel())
    return shutil.which("compute-sanitizer") or next((place for place in places if os.access(place, os.X_OK)), None)


def _places_of_wheel() -> list[str]:
    """Where pip has put it."""
    try:
        files = importlib.metadata.files(_WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [str(file.locate()) for file in files if file.name == "compute-sanitizer"]


def check(tool: str) -> subprocess.CompletedProcess[str]:
    """Compile outside, run inside; the result's status is 0 where nothing was found."""
    here = [sys.executable, "-m", "tests.gpu.sanitized_step", "--inside"]
    environment = os.environ | {
        "PYTHONPATH": import_path(),
        # Compilers in child processes would be watched too.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    subprocess.run(here, env=environment, check=True, timeout=300)
    path = sanitizer()
    assert path is not None
    command = [path, "--tool", tool, "--error-exitcode", str(_FAULT), "--print-limit", "20", *here]
    environment |= {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=SECONDS)


def run_one_bucket() -> None:
    """Forward, loss, backward and update, twice, of every adversarial pack in one small length."""
    import torch

    from drafter_trainer import flex_policy
    from drafter_trainer.warmup import adversarial_batches, load_representable_weights, run_steps
    from tests.gpu.real_step import VOCABULARY, real_plan, real_spec, real_step

    flex_policy.configure_compiler()
    flex_policy.install_tripwire()
    # No CUDA graphs: without the caching allocator, what a recording allocates is a cudaMalloc, which CUDA forbids
    # there. The same kernels are launched one by one; only the update reads gradients where the backward left them.
    spec, lengths = real_spec(cuda_graphs=False), (512,)
    step, plan = real_step(spec, lengths), real_plan(spec, lengths)
    load_representable_weights(step)
    for _ in range(2):
        run_steps(step, adversarial_batches(step.device, plan, torch.bfloat16, vocab_size=VOCABULARY))
    torch.cuda.synchronize()


def main(arguments: list[str]) -> int:
    """The exit status."""
    if arguments == ["--inside"]:
        run_one_bucket()
        return 0
    if sanitizer() is None:
        sys.stderr.write(f"compute-sanitizer is not on PATH nor under /usr/local/cuda: pip install {_WHEEL}\n")
        return 4
    result = check(arguments[0] if arguments else "memcheck")
    sys.stdout.write(result.stdout + result.stderr)
    return 1 if result.returncode else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
