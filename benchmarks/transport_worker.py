"""One process of benchmarks/transport.py: a reader that measures bytes, or a trainer that measures round trips.

It obeys benchmarks/worker_process.py.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.step_reader import StepReader, Subscription
from benchmarks.worker_process import commands, reply
from slipstream.run_spec.spec import DataSpec
from slipstream.wire.channel import TargetClient

PACK_TOKENS = 128
LAYERS = (0, 2)
SHELF_PACKS = 12
"""Of the stream's beginning; they stay on the shelf, so that no round trip waits for the target."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("bytes", "trips"))
    parser.add_argument("--address", required=True)
    parser.add_argument("--data", default="")
    parser.add_argument("--run", default="benchmark")
    args = parser.parse_args()
    with TargetClient(args.address) as client:
        answer: Callable[..., dict[str, Any]]
        answer = measure_bytes(client) if args.what == "bytes" else RoundTrips(client, args.run, args.data).measure
        for asked in commands():
            reply(answer(**asked))
    return 0


def measure_bytes(client: TargetClient) -> Callable[..., dict[str, Any]]:
    """Gigabytes (10^9) per second by round: single-thread memcpy, `shm`, `grpc`, taking turns on the probe payload."""
    import numpy as np

    from slipstream.wire.transports import PayloadRef, choose_reader

    target = client.get_target()
    fixed = PayloadRef.of_fixed(target.probe)
    # As packs are read: into memory that is used again.
    probe = PayloadRef(fixed.token, fixed.manifest, fixed.locations, time_to_live=60.0)
    names = [spec.name for spec in probe.manifest.tensors]
    size = probe.manifest.payload_size_bytes
    source, copy = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    readers = [choose_reader(name, target, client.channel) for name in ("shm", "grpc")]
    moves: dict[str, Callable[..., object]] = {"memcpy": lambda: np.copyto(copy, source)}
    for reader in readers:
        moves[reader.name] = lambda reader=reader: reader.read(probe, names)

    def measure(seconds: float, rounds: int) -> dict[str, Any]:
        rates: dict[str, list[float]] = {name: [] for name in moves}
        for _ in range(rounds):
            for name, move in moves.items():
                rates[name].append(rate(move, size, seconds))
        return {"payload_bytes": size, "gigabytes_per_second": rates}

    return measure


def rate(move: Callable[..., object], size: int, seconds: float) -> float:
    """`move` repeated for so long; once before, unmeasured."""
    move()
    moved, began = 0, time.perf_counter()
    while True:
        move()
        moved += size
        elapsed = time.perf_counter() - began
        if elapsed >= seconds:
            return moved / elapsed / 1e9


class RoundTrips:
    """A trainer with a run of its own that takes no time to train."""

    def __init__(self, client: TargetClient, run: str, data: str) -> None:
        self._run = StepReader(client, Subscription(run, DataSpec(files=(data,), pack_tokens=PACK_TOKENS), LAYERS))

    def measure(self, seconds: float, step_seconds: float) -> dict[str, Any]:
        """Milliseconds of every lease, confirm and commit for so long; a new step every `step_seconds`, or at once."""
        self._cycle(step_seconds=0.0)  # the packs get onto the shelf
        times: list[list[float]] = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            times += self._cycle(step_seconds)
        medians = [statistics.median(column) for column in zip(*times, strict=True)]
        return {
            "milliseconds": [sum(each) for each in times],
            "median": dict(zip(("lease", "confirm", "commit"), medians, strict=True)),
        }

    def _cycle(self, step_seconds: float) -> list[list[float]]:
        """Seek to the beginning, then take the first packs of the stream as steps."""
        self._run.seek(0)
        return [self._step(step, step_seconds) for step in range(SHELF_PACKS)]

    def _step(self, step: int, step_seconds: float) -> list[float]:
        began = time.perf_counter()
        (lease,) = self._run.lease()
        leased = time.perf_counter()
        self._run.confirm(lease)
        confirmed = time.perf_counter()
        self._run.commit(step)
        committed = time.perf_counter()
        time.sleep(max(0.0, step_seconds - (committed - began)))
        return [1000 * (leased - began), 1000 * (confirmed - leased), 1000 * (committed - confirmed)]


if __name__ == "__main__":
    sys.exit(main())
