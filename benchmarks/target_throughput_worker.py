"""One side of benchmarks/target_throughput.py in a process of its own; writes its answer as JSON.

forward   our forward and transformers' own, one model, taking turns
serve     a real target server in this process; what it serves is read by benchmarks/feeder_worker.py
"""

import argparse
import copy
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.engine_times import DeviceTimes, EngineTimes
from benchmarks.random_target import build_tokenizer, random_model, write_documents
from benchmarks.target_workload import BATCH_DOCUMENTS, PACK_TOKENS, SHAPES, Shape, real_batches, real_packs
from slipstream.child_processes import child_process
from slipstream.telemetry.logs import configure_logging

ROUNDS = 3
EVEN_LENGTH = 1024
WATCH_SECONDS = 0.02


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("forward", "serve"))
    parser.add_argument("--size", choices=SHAPES, required=True)
    parser.add_argument("--compile", choices=("true", "false"), default="false")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    # The parent starts its children with signals held, and a server ends by one.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))
    configure_logging("target-throughput", level="info", json=False)
    answer = {"forward": measure_forward, "serve": measure_server}[args.what](args)
    args.output.write_text(json.dumps(answer), encoding="utf-8")
    return 0


# ---- forward ----


def measure_forward(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second by round: ours and transformers' on even documents and on real ones."""
    import torch

    shape = SHAPES[args.size]
    model = random_model(shape, args.device)
    # A second model on the same weights: transformers leaves hooks in a model that was asked for hidden states.
    shared: dict[int, Any] = {id(weight): weight for weight in (*model.parameters(), *model.buffers())}
    theirs = Theirs(copy.deepcopy(model, shared), shape, args.device)
    ours = Ours(model, shape, args)
    small = args.device == "cpu"
    even = [EVEN_LENGTH // (8 if small else 1)] * BATCH_DOCUMENTS
    packs, batches = real_packs(1 if small else 4), real_batches(2 if small else 8)
    answer: dict[str, Any] = {"compile_seconds": ours.compile_seconds, "graphs": ours.graphs}
    repeats = 1 if small else 3
    cases = {"even": ([even] * repeats, [even] * repeats), "real": (packs, batches)}
    for case, (our_rows, their_rows) in cases.items():
        rates: dict[str, list[float]] = {"ours": [], "theirs": []}
        for round_number in range(ROUNDS + 1):
            for name, side, rows in (("ours", ours, our_rows), ("theirs", theirs, their_rows)):
                rate = timed(side, rows, args.device)
                if round_number:  # the first one warms up
                    rates[name].append(rate)
        answer[case] = rates
    answer["launch_ms"] = ours.launch_milliseconds(packs[0], args.device)
    answer["recorded"] = ours.recorded
    answer["pack_fill"] = sum(map(sum, packs)) / (len(packs) * PACK_TOKENS)
    answer["attention"] = ours.attention
    answer["parts"] = ours.profile(packs[0]) if args.device == "cuda" else {}
    if args.device == "cuda":
        answer["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        answer["reserved_gib"] = torch.cuda.memory_reserved() / 2**30
    return answer


def random_tokens(shape: Shape, count: int = PACK_TOKENS) -> npt.NDArray[np.int32]:
    """`[count]`. Equal tokens have equal hidden states, which a GPU multiplies faster than those of text."""
    return np.random.default_rng(0).integers(0, shape.config["vocab_size"], count).astype(np.int32)


def timed(side: "Ours | Theirs", rows: Sequence[Sequence[int]], device: str) -> float:
    """Tokens of documents per second."""
    synchronise(device)
    began = time.perf_counter()
    for lengths in rows:
        side.run(lengths)
    synchronise(device)
    return sum(map(sum, rows)) / (time.perf_counter() - began)


class Ours:
    """The packed forward, of what a drafter reads."""

    def __init__(self, model: Any, shape: Shape, args: argparse.Namespace) -> None:
        from target_server.forward import PackedForward

        self._shape = shape
        self._forward = PackedForward(model, backend="inductor" if args.compile == "true" else None)
        self.attention = self._forward.attention
        began = time.perf_counter()
        self.graphs = self._forward.prepare(PACK_TOKENS)
        self.compile_seconds = time.perf_counter() - began
        self.recorded = self._forward.is_recorded(PACK_TOKENS)
        self._tokens = random_tokens(shape)

    def run(self, lengths: Sequence[int]) -> None:
        self._forward.capture(self._tokens, lengths, self._shape.layer_ids, last_hidden_state=False)

    def launch_milliseconds(self, lengths: Sequence[int], device: str) -> dict[str, float]:
        """Of one pack: until the host has launched it, and until the device has computed it."""
        launched, computed = [], []
        for _ in range(5):
            synchronise(device)
            began = time.perf_counter()
            self.run(lengths)
            launched.append(time.perf_counter() - began)
            synchronise(device)
            computed.append(time.perf_counter() - began)
        return {"launched": 1e3 * float(np.median(launched)), "computed": 1e3 * float(np.median(computed))}

    def profile(self, lengths: Sequence[int]) -> dict[str, float]:
        """Milliseconds on the device of the kernels that take longest, for one pack."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            self.run(lengths)
            synchronise("cuda")
        events = [(event.key, event.self_device_time_total / 1e3) for event in profiler.key_averages()]
        longest = sorted(events, key=lambda event: -event[1])[:12]
        return {"all kernels": sum(spent for _, spent in events)} | {name[:90]: spent for name, spent in longest}


class Theirs:
    """transformers' decoder with all hidden states and without the head; batches of equal rows are not masked."""

    def __init__(self, model: Any, shape: Shape, device: str) -> None:
        import torch

        from slipstream.target_loading import decoder_of

        self._decoder, self._device = decoder_of(model), device
        tokens = torch.from_numpy(random_tokens(shape, BATCH_DOCUMENTS * PACK_TOKENS))
        self._tokens = tokens.long().to(device)

    def run(self, lengths: Sequence[int]) -> None:
        import torch

        longest = max(lengths)
        mask = torch.arange(longest)[None] < torch.tensor(lengths)[:, None]
        padded = None if bool(mask.all()) else mask.long().to(self._device)
        tokens = self._tokens[: len(lengths) * longest].view(len(lengths), longest)
        with torch.inference_mode():
            self._decoder(input_ids=tokens, attention_mask=padded, output_hidden_states=True, use_cache=False)


def synchronise(device: str) -> None:
    """Wait for the device."""
    import torch

    if device != "cpu":
        torch.cuda.synchronize()


# ---- server ----


def measure_server(args: argparse.Namespace) -> dict[str, Any]:
    """Packs per second of the forward alone, then as a subscriber gets them from the running server.

    Everything is the server's own but the loading of weights, which would only be read from a file to be random.
    """
    from slipstream.wire.arena import shared_memory_directory
    from target_server.server import ServerSettings, TargetServer
    from target_server.target_model import TargetModel

    shape = SHAPES[args.size]
    alone: dict[str, Any] = {}
    loaded, ended = threading.Event(), threading.Event()

    def load(_spec: Any, *, device: str) -> Any:
        target = random_target(shape, spec, device, Path(directory))
        alone["packs_per_second"] = packs_alone(target, shape, device)
        loaded.set()
        return target

    with TemporaryDirectory(prefix="target-throughput-") as directory:
        spec = target_spec(shape, args)
        TargetModel.load = load  # type: ignore[method-assign, assignment]
        settings = ServerSettings(
            target=spec,
            listen=free_address(),
            ledger=Path(directory) / "ledger.sqlite",
            device=args.device,
            shelf_bytes=4 * 2**30 if args.device != "cpu" else 2**28,
            shm_dir=shared_memory_directory(),
            data_roots=None,
            pack_tokens=PACK_TOKENS,
        )
        server = TargetServer(settings)
        documents = write_documents(shape, Path(directory) / "documents.jsonl")
        output, counting = Path(directory) / "subscriber.json", Path(directory) / "counting"
        command = [sys.executable, "-m", "benchmarks.feeder_worker", "--size", args.size, "--device", args.device]
        command += ["--address", str(server.address), "--data", str(documents)]
        command += ["--counting", str(counting), "--output", str(output)]
        engine, gpu = EngineTimes(server, counting), DeviceTimes()
        if args.device != "cpu":
            gpu.watch()
        subscriber = threading.Thread(target=run_subscriber, args=(command, loaded, ended, engine.look), daemon=True)
        subscriber.start()
        try:
            server.run()
        finally:
            ended.set()
            loaded.set()
            subscriber.join()
        if not output.exists():
            raise SystemExit("the subscriber failed")
        answer: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return answer | {"forward": alone, "engine_ms": engine.milliseconds, "gpu_ms": gpu.milliseconds()}


def run_subscriber(
    command: Sequence[str], loaded: threading.Event, ended: threading.Event, look: Callable[[], None]
) -> None:
    """Run the subscriber once there is something to subscribe to, then end the server as its operator would.

    `look` is called now and then meanwhile.
    """
    loaded.wait()
    if ended.is_set():
        return
    with child_process(command) as process:
        while process.poll() is None and not ended.wait(WATCH_SECONDS):
            look()
    if not ended.is_set():
        os.kill(os.getpid(), signal.SIGTERM)


def target_spec(shape: Shape, args: argparse.Namespace) -> Any:
    from slipstream.run_spec.spec import TargetSpec

    on_gpu = args.device != "cpu"
    return TargetSpec(model=shape.title, dtype="bfloat16" if on_gpu else "float32", compile=args.compile == "true")


def random_target(shape: Shape, spec: Any, device: str, directory: Path) -> Any:
    """A target that was never a file, ready for packs."""
    import torch

    from slipstream.target_files import TargetFiles
    from slipstream.target_loading import LoadedTarget
    from target_server.target_model import TargetModel

    tokenizer = build_tokenizer(shape.config["vocab_size"], directory)
    files = TargetFiles(directory, (), (), None)
    target = TargetModel(LoadedTarget(random_model(shape, device), tokenizer, files), spec, "0" * 64)
    # Nobody reads the frozen weights here, and the server would copy them for trainers first.
    target.frozen_weights = lambda: {"norm.weight": torch.ones(8)}  # type: ignore[method-assign]
    target.prepare(PACK_TOKENS)
    return target


def packs_alone(target: Any, shape: Shape, device: str) -> list[float]:
    """Packs per second of the forward alone, by round; in the thread that will serve."""
    packs = real_packs(6 if device != "cpu" else 1)
    tokens = random_tokens(shape)
    rates = []
    for _ in range(ROUNDS + 1):
        synchronise(device)
        began = time.perf_counter()
        for lengths in packs:
            target.capture(tokens, lengths, shape.layer_ids, False)
        synchronise(device)
        rates.append(len(packs) / (time.perf_counter() - began))
    return rates[1:]


def free_address() -> Any:
    from slipstream.listen import ListenAddress

    return ListenAddress.parse("127.0.0.1:0")


if __name__ == "__main__":
    sys.exit(main())
