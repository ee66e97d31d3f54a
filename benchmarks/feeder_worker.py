"""The subscriber of benchmarks/target_throughput.py: a trainer's own feeder, and a step that takes no time.

Its threads lease, read, draw anchors, copy to the device and confirm as those of `drafter-trainer run` do; the training
thread waits until a pack has arrived, forgets it, and commits its step. Writes its answer as JSON.
"""

import argparse
import json
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.target_workload import PACK_TOKENS, SHAPES, Shape
from benchmarks.times_since import TimesSince
from drafter_trainer.batch_source import BatchSource
from drafter_trainer.build_step import pack_plan
from drafter_trainer.device_copy import DeviceCopy
from drafter_trainer.run_directory import RunDirectory
from drafter_trainer.target_link import Position, TargetLink
from drafter_trainer.wait_notice import WaitNotice
from slipstream.child_processes import leave_with_parent
from slipstream.run_spec.spec import DataSpec, DrafterSpec, RunSpec, TargetSpec, TrainSpec
from slipstream.telemetry.logs import configure_logging
from slipstream.wire.channel import TargetClient
from slipstream.wire.tensor_names import hidden_state_name

ANCHORS = 1024
"""Per pack, as the recipes for packs of this length have it."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SHAPES, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--address", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--counting", type=Path, required=True, help="file that is there while packs are counted")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    # The parent starts its children with signals held.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))
    # A client waits for its server for ever; that of a server that was killed would be left behind.
    leave_with_parent()
    configure_logging("subscriber", level="info", json=False)
    args.output.write_text(json.dumps(feed(args)), encoding="utf-8")
    return 0


def feed(args: argparse.Namespace) -> dict[str, Any]:
    """Packs per second, milliseconds per pack of each of the feeder's phases, and how payloads were read."""
    shape, device = SHAPES[args.size], torch.device(args.device)
    spec = run_spec(shape, args.data)
    notice, stop = WaitNotice(args.address), threading.Event()

    with (
        TemporaryDirectory(prefix="feeder-") as directory,
        TargetClient(args.address, on_wait=notice, on_answer=notice.over, stop=stop) as client,
    ):
        link = TargetLink(client, notice, spec, RunDirectory(Path(directory)), pin_memory=device.type == "cuda")
        try:
            link.handshake()
            link.begin(Position(), shape.layer_ids)
            names = [hidden_state_name(layer) for layer in shape.layer_ids]
            plan = replace(
                pack_plan(spec, names, shape.config["hidden_size"]),
                first_sequence_number=link.first_sequence_number,
                total_steps=shape.skipped_packs + shape.serve_packs,
            )
            source = BatchSource(link, plan, DeviceCopy(device), stop)
            try:
                source.start(0)
                return take_steps(source, link, shape, args.counting)
            finally:
                source.close()
        finally:
            link.close()


def take_steps(source: BatchSource, link: TargetLink, shape: Shape, counting: Path) -> dict[str, Any]:
    """Every step of the run; those before `shape.skipped_packs` are not counted."""
    steps = shape.skipped_packs + shape.serve_packs
    before, waited, committed, began = TimesSince(source.times), 0.0, 0.0, 0.0
    for step in range(steps):
        if step == shape.skipped_packs:
            counting.touch()
            before, waited, committed = TimesSince(source.times), source.waited_seconds, link.commit_seconds
            began = time.perf_counter()
        batch = source.next_batch()
        assert batch is not None, "the stream repeats for ever, and nobody told the feeder to stop"
        batch.packs[0].tensors["input_ids"][-1].item()  # on a GPU: until it is there
        link.commit(step)
    seconds = time.perf_counter() - began
    counting.unlink()
    per_pack = 1e3 / shape.serve_packs
    training = {
        "waited": (source.waited_seconds - waited) * per_pack, "commit": (link.commit_seconds - committed) * per_pack
    }  # fmt: skip
    return {
        "packs_per_second": shape.serve_packs / seconds,
        "feeder_ms": before.milliseconds(),
        "training_ms": {phase: round(spent, 2) for phase, spent in training.items()},
        "transport": link.reader.name,
    }


def run_spec(shape: Shape, documents: Path) -> RunSpec:
    """The run; of its drafter nothing is built."""
    return RunSpec(
        name="benchmark",
        target=TargetSpec(model=shape.title),
        data=DataSpec(files=(str(documents),), format="tokens", pack_tokens=PACK_TOKENS),
        drafter=DrafterSpec(target_layer_ids=shape.layer_ids),
        train=TrainSpec(anchors_per_pack=ANCHORS, max_steps=shape.skipped_packs + shape.serve_packs),
    )


if __name__ == "__main__":
    sys.exit(main())
