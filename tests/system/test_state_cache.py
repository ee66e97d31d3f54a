"""A run with a cache of hidden states: after its first epoch the target has nothing to do, and it learns the same."""

import re
from pathlib import Path

import torch

from tests.fakes.processes import ManagedProcess, Processes
from tests.fakes.tiny_run import write_conversations, write_tiny_run
from tests.fakes.training import Trainer

EPOCHS = 6


def train(processes: Processes, recipe: Path, directory: Path, *flags: str | Path) -> tuple[Trainer, ManagedProcess]:
    """A whole run with a target server of its own, which has left in order."""
    ledger = directory / "ledger.sqlite"
    server, address = processes.start_target_server(recipe, "--ledger", ledger, "--probe-bytes", "1MiB", *flags)
    trainer = Trainer(processes, recipe, directory / "run", "train.max_steps=100000", f"train.epochs={EPOCHS}")
    trainer.finish(address)
    server.terminate()
    assert server.wait_exit(timeout=60) == 0, server.output
    return trainer, server


def packs_computed(server: ManagedProcess) -> int:
    """For which the engine ran the target; its last words say so."""
    return sum(map(int, re.findall(r"engine_times packs=(\d+)", server.output)))


def test_later_epochs_come_from_the_disk(processes: Processes, tmp_path: Path) -> None:
    recipe = write_tiny_run(tmp_path / "tiny")
    write_conversations(recipe.parent / "conversations.jsonl", count=12)
    cache = ("--state-cache", tmp_path / "cache", "--state-cache-bytes", "64MiB")
    plain, plain_server = train(processes, recipe, tmp_path / "plain")
    cached, cached_server = train(processes, recipe, tmp_path / "cached", *cache)

    steps = len(plain.losses())
    assert cached.losses().keys() == plain.losses().keys()
    assert packs_computed(plain_server) - steps in (0, 1, 2)  # two may be computed ahead of the run
    # The engine may begin the second epoch before the disk has all of the first.
    assert packs_computed(cached_server) < steps / 2, cached_server.output
    assert "state_cache_used" in cached_server.output
    assert "not equal bit for bit" in cached_server.output
    weights, expected = cached.weights(), plain.weights()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-2, atol=1e-3)
