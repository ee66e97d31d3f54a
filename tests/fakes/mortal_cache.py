"""Processes that write into a cache of hidden states: killed at any instruction, or on a disk that takes no more.

    python -m tests.fakes.mortal_cache kills DIR --seed 0 --kills 20
    python -m tests.fakes.mortal_cache full DIR

A record is a function of its number, so that whoever finds one knows what it must be. Prints one line at the end.
"""

import argparse
import os
import random
import resource
import signal
import struct
import sys
import traceback
from pathlib import Path

import numpy as np

from slipstream.telemetry.logs import configure_logging
from slipstream.wire.codec import ByteArray
from target_server.state_cache_store import StateStore
from target_server.state_cache_writer import StateRows, StateWriter

BUDGET = 8 * 2**20
RECORDS = 300
"""Numbers from 0 on; all of them take about three times the budget."""
_NUMBER = struct.Struct("<I")
_PATIENCE_SECONDS = 60.0


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


def size_of(number: int) -> int:
    return 1 + number * 7919 % (160 * 2**10)


def content(number: int) -> ByteArray:
    return np.frombuffer(random.Random(number).randbytes(size_of(number)), np.uint8)


def write_until_killed(directory: Path, seed: int, acknowledged: int) -> None:
    """Put records; the number of each goes down the pipe once it is in the store."""
    store = StateStore(directory, BUDGET)
    rng = random.Random(seed)
    while True:
        number = rng.randrange(RECORDS)
        with store.reading({key_of(number): size_of(number)}) as places:
            there = bool(places)
        if not there and store.put(key_of(number), content(number)):
            os.write(acknowledged, _NUMBER.pack(number))


def check(directory: Path, newest: int | None) -> int:
    """Read everything that the next server finds; returns how many records there are."""
    store = StateStore(directory, BUDGET)
    used = sum(path.stat().st_size for path in directory.iterdir())
    assert used <= store.used_bytes <= BUDGET, (used, store.used_bytes)
    for number in range(RECORDS):
        buffer = np.zeros(size_of(number), np.uint8)
        with store.reading({key_of(number): size_of(number)}) as places:
            for key, place in places.items():
                assert store.read(key, place, buffer), f"record {number} is damaged, though no power was cut"
                assert np.array_equal(buffer, content(number)), f"record {number} is another one"
    assert newest is None or key_of(newest) in store, f"record {newest} was in the store and is lost"
    found = len(store)
    store.close()
    return found


def kills(directory: Path, seed: int, count: int) -> str:
    """Kill a writer, look at what it left, start another."""
    rng = random.Random(seed)
    found = []
    for turn in range(count):
        receiver, sender = os.pipe()
        child = os.fork()
        if not child:
            try:
                write_until_killed(directory, seed + turn, sender)
            except BaseException:  # noqa: BLE001 - the process's boundary
                traceback.print_exc()
            os._exit(1)
        os.close(sender)
        newest = None
        with os.fdopen(receiver, "rb") as numbers:
            for _ in range(rng.randrange(60)):
                (newest,) = _NUMBER.unpack(numbers.read(_NUMBER.size))
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
            left = numbers.read()
            if len(left) >= _NUMBER.size:
                (newest,) = _NUMBER.unpack(left[-_NUMBER.size :])
        found.append(check(directory, newest))
    return f"killed {count} times, found {found}"


def full(directory: Path) -> str:
    """Offer records until the disk takes no more; what is there is still read."""
    store = StateStore(directory, BUDGET)
    resource.setrlimit(resource.RLIMIT_FSIZE, (BUDGET // 128, resource.RLIM_INFINITY))
    writer = StateWriter(store, lambda: None)
    refused = 0
    for number in range(1, 41):
        taken = writer.offer(content(number), [StateRows(key_of(number), 0, 0, size_of(number))])
        assert writer.wait_until_written(_PATIENCE_SECONDS)
        refused += not taken
    assert 0 < len(store) < 40
    assert refused > 10
    writer.close()
    store.close()
    return f"{check(directory, None)} records are there, {refused} were refused"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("kills", "full"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=20)
    args = parser.parse_args()
    configure_logging("mortal-cache", level="info")
    said = full(args.directory) if args.what == "full" else kills(args.directory, args.seed, args.kills)
    sys.stdout.write(f"{said}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
