"""A subscriber of benchmarks/pipeline.py in a process of its own: it reads packs and does not train.

It obeys benchmarks/worker_process.py; every command is a run.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.step_reader import StepReader, Subscription
from benchmarks.worker_process import commands, reply
from slipstream.run_spec.load import load_recipe
from slipstream.run_spec.spec import RunSpec
from slipstream.wire.channel import TargetClient
from slipstream.wire.transports import PayloadReader, choose_reader

PREFETCH_PACKS = 4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, help="names drafter.target_layer_ids")
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--address", required=True)
    args = parser.parse_args()
    spec = load_recipe(args.recipe, args.overrides).spec
    with TargetClient(args.address) as client:
        reader = choose_reader(spec.stream.transport, client.get_target(), client.channel)
        for asked in commands():
            reply(read(client, reader, spec, asked))
        reader.close()
    return 0


def read(client: TargetClient, reader: PayloadReader, spec: RunSpec, asked: dict[str, Any]) -> dict[str, Any]:
    """Packs of a run for so many seconds from the first one on.

    Args:
        asked: `run`, `seconds`; for runs that start together `group` and `group_size`; `first_step`, default 0.

    Returns:
        When each pack was committed, in seconds of the host's monotonic clock; seconds spent waiting for packs.
    """
    assert spec.drafter.target_layer_ids is not None, "the recipe names the layers"
    wanted = Subscription(
        asked["run"],
        spec.data,
        spec.drafter.target_layer_ids,
        spec.loss.needs_target_distribution,
        asked.get("group", ""),
        asked.get("group_size", 0),
        asked.get("first_step", 0),
    )
    run = StepReader(client, wanted, reader)
    committed: list[float] = []
    waited = 0.0
    while not committed or time.monotonic() < committed[0] + asked["seconds"]:
        asked_at = time.monotonic()
        leases = run.lease(PREFETCH_PACKS)
        if committed:
            waited += time.monotonic() - asked_at
        for lease in leases:
            run.read(lease)
            run.confirm(lease)
            run.commit(lease.step)
            committed.append(time.monotonic())
    run.leave()
    return {"committed": committed, "waited_seconds": waited, "transport": reader.name}


if __name__ == "__main__":
    sys.exit(main())
