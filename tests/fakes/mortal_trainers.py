"""Trainers that do everything between the steps of a run, learn only which packs they had, and are killed.

As a process (`python -m tests.fakes.mortal_trainers …`) it forks two trainers for each of two runs and starts another
for every one that ended. One of a run's two has its turn; the kernel gives it to the other when the first is gone.
A trainer is the product's own client (TargetLink, BatchSource, RunDirectory) around a checkpoint that holds, instead of
weights, what weights would be made of: every step with its packs and their bytes' checksums.

What happens to the trainers of a run is drawn from the seed before anything starts. They send SIGKILL to themselves, so
that a death falls on one point of the protocol at one step, however busy the machine is.
"""

import argparse
import fcntl
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from drafter_trainer.batch_source import BatchSource
from drafter_trainer.device_copy import DeviceCopy
from drafter_trainer.run_directory import RunDirectory
from drafter_trainer.target_link import Position, TargetLink
from drafter_trainer.training_packs import PackPlan, StepBatch, payload_shapes
from drafter_trainer.wait_notice import WaitNotice
from slipstream import disk
from slipstream.child_processes import sigterm_as_exit
from slipstream.errors import SlipstreamError
from slipstream.hidden_states.v1 import batch_pb2
from slipstream.hidden_states.v1 import hidden_state_service_pb2 as pb
from slipstream.run_spec.load import load_recipe
from slipstream.run_spec.reasons import Reason
from slipstream.telemetry.logs import configure_logging
from slipstream.wire.channel import TargetClient
from slipstream.wire.codec import checksum

LAYERS = (1, 2)
TRAINERS_PER_RUN = 2
CHECKPOINT = "cursor.json"
ACKNOWLEDGED = "acknowledged.txt"
"""Commits that the server has answered, `incarnation step` a line."""
HAPPENED = "happened.txt"

FENCED = 75
"""Exit status of a trainer whose run was taken over."""
_PATIENCE_SECONDS = 90.0

DEATHS = ("handed over", "committed", "half saved", "saved", "read", "confirmed")
REPLACED = "replaced"
"""The trainer lives on and trains while the other one takes its run over."""
SERVER = "server"
"""The trainer kills the server before a commit."""


@dataclass(frozen=True)
class Fate:
    """What happens, and at how many steps after the fate before it."""

    what: str
    after: int


def draw_fates(seed: int, run: str, *, steps: int, deaths: int, servers: int) -> list[Fate]:
    """All of them happen, since a run of `steps` is never done before the last."""
    rng = random.Random(f"{seed} {run}")
    kinds = [REPLACED, *(SERVER for _ in range(servers)), *rng.choices(DEATHS, k=deaths)]
    rng.shuffle(kinds)
    return [Fate(kind, rng.randrange(steps // len(kinds))) for kind in kinds]


@dataclass(frozen=True)
class RunPlan:
    """One of the two runs."""

    name: str
    packs_per_step: int
    steps: int
    save_every: int
    fates: list[Fate]


def plan_runs(seed: int, packs: int) -> list[RunPlan]:
    """Two runs of `packs` packs on one stream; those of the first kill the server, twice."""
    plans = []
    for name, packs_per_step, servers in (("pairs", 2, 2), ("singles", 1, 0)):
        steps = packs // packs_per_step
        fates = draw_fates(seed, name, steps=steps, deaths=packs // 15, servers=servers)
        plans.append(RunPlan(name, packs_per_step, steps, 3 + packs_per_step, fates))
    return plans


@dataclass
class Learned:
    """The checkpoint."""

    next_step: int = 0
    first_sequence_number: int | None = None
    incarnation: int = 0
    stream: str | None = None
    steps: list[tuple[int, dict[int, int]]] = field(default_factory=list)
    """Every step that was applied, in order: its number, and the checksums of its packs by sequence number."""


class Mortal:
    """Knows what happens next to the run, and makes it happen. Its threads are the training thread and the feeder."""

    def __init__(self, plan: RunPlan, directory: Path, ledger: Path) -> None:
        self._plan = plan
        self._happened = directory / HAPPENED
        self._ledger = ledger
        self._lock = threading.Lock()
        self._step = 0

    def begin(self, step: int) -> None:
        """Fates are counted from here."""
        self._step = step
        done = len(self._happened.read_text().splitlines()) if self._happened.exists() else 0
        self._next = self._plan.fates[done] if done < len(self._plan.fates) else None

    def is_due(self, what: str, step: int) -> bool:
        """True, once, when it is time for it; the file says so before anything happens."""
        with self._lock:
            if self._next is None or self._next.what != what or step < self._step + self._next.after:
                return False
            append(self._happened, f"{what} at step {step}")
            say(f"{self._plan.name}: {what} at step {step}")
            self.begin(step)
            if what == REPLACED:
                self._next = None  # what comes next happens to the other trainer
            return True

    def die_if_due(self, what: str, step: int) -> None:
        """SIGKILL."""
        if self.is_due(what, step):
            os.kill(os.getpid(), signal.SIGKILL)

    def kill_server_if_due(self, step: int) -> None:
        """SIGKILL to the process that holds the ledger."""
        if self.is_due(SERVER, step):
            os.kill(int(Path(f"{self._ledger}.lock").read_text()), signal.SIGKILL)


class MortalLink(TargetLink):
    """The product's, with deaths around ConfirmRead, in the feeder thread."""

    mortal: Mortal

    def confirm(self, lease: batch_pb2.Lease) -> bool:
        self.mortal.die_if_due("read", lease.step)
        confirmed = super().confirm(lease)
        self.mortal.die_if_due("confirmed", lease.step)
        return confirmed


class MortalTrainer:
    """One trainer process, once it has its turn."""

    def __init__(self, plan: RunPlan, args: argparse.Namespace, turn: int) -> None:
        settings = [
            *(f"name={plan.name}", f"train.max_steps={plan.steps}", f"train.packs_per_step={plan.packs_per_step}"),
            f"stream.prefetch_packs={2 + plan.packs_per_step}",
        ]
        self._plan = plan
        self._turn = turn
        self._spec = load_recipe(args.recipe, settings).spec
        self._run = RunDirectory(args.directory / plan.name)
        self._checkpoint = self._run.root / CHECKPOINT
        self._mortal = Mortal(plan, self._run.root, args.ledger)
        self._address = args.target
        self.learned = read_checkpoint(self._checkpoint)

    def train(self) -> None:
        """To the end of the run.

        Raises:
            SlipstreamError: INCARNATION_STALE when the run was taken over.
        """
        learned = self.learned
        self._mortal.begin(learned.next_step)
        with TargetClient(self._address) as client:
            link = MortalLink(client, WaitNotice(self._address), self._spec, self._run, pin_memory=False)
            link.mortal = self._mortal
            link.handshake()
            incarnation = self._run.newest_incarnation()
            link.begin(
                Position(learned.next_step, learned.first_sequence_number, (), incarnation, learned.stream), LAYERS
            )
            learned.first_sequence_number, learned.stream = link.first_sequence_number, link.stream
            source = BatchSource(link, self._pack_plan(link), DeviceCopy(torch.device("cpu")), threading.Event())
            source.start(learned.next_step)
            while learned.next_step < self._plan.steps:
                batch = source.next_batch()
                assert batch is not None and batch.step == learned.next_step, (batch, learned.next_step)
                self._do(client, link, batch)
            source.close()

    def _do(self, client: TargetClient, link: MortalLink, batch: StepBatch) -> None:
        """Apply, commit, save: in the order of the product's loop."""
        step, mortal, learned = batch.step, self._mortal, self.learned
        packs = {pack.sequence_number: checksum_of(pack.tensors) for pack in batch.packs}
        mortal.die_if_due("handed over", step)
        mortal.kill_server_if_due(step)
        if mortal.is_due(REPLACED, step):
            self._let_the_other_take_over(client, link, step)
        link.commit(step)
        with link.incarnation_held() as incarnation:
            append(self._run.root / ACKNOWLEDGED, f"{incarnation} {step}")
        mortal.die_if_due("committed", step)
        learned.steps.append((step, packs))
        learned.next_step = step + 1
        if mortal.is_due("half saved", step):
            self._checkpoint.with_name(f".{CHECKPOINT}.{os.getpid()}").write_text(json.dumps(asdict(learned))[:-9])
            os.kill(os.getpid(), signal.SIGKILL)
        dies = mortal.is_due("saved", step)
        if dies or learned.next_step % self._plan.save_every == 0 or learned.next_step == self._plan.steps:
            with link.incarnation_held() as incarnation, self._run.owned(incarnation):
                learned.incarnation = incarnation
                disk.write_atomically(self._checkpoint, json.dumps(asdict(learned)))
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)

    def _let_the_other_take_over(self, client: TargetClient, link: MortalLink, step: int) -> None:
        """Commit on and on, as a trainer that was thought dead does, until it is told that its time is over."""
        link.commit(step)
        with link.incarnation_held() as held:
            incarnation = held
        fcntl.flock(self._turn, fcntl.LOCK_UN)
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < deadline:
            request = pb.CommitStepRequest(subscription=link.subscription, incarnation=incarnation, step=step)
            client.commit_step(request)
            threading.Event().wait(0.01)
        raise AssertionError("nobody has taken the run over")

    def _pack_plan(self, link: TargetLink) -> PackPlan:
        names = [f"hidden_states.{layer}" for layer in LAYERS]
        return PackPlan(
            first_sequence_number=link.first_sequence_number,
            packs_per_step=self._plan.packs_per_step,
            total_steps=self._plan.steps,
            tensor_shapes=payload_shapes(names, self._spec.data.pack_tokens, 64),
            num_anchors=self._spec.train.anchors_per_pack,
            seed=0,
            prefetch_packs=self._spec.stream.prefetch_packs,
            lease_seconds=self._spec.stream.lease_seconds,
        )


def live(plan: RunPlan, args: argparse.Namespace) -> int:
    """A trainer's life: wait for the turn, train. Returns the exit status; 0: the run is done."""
    with turn_of(args.directory / plan.name) as turn:
        trainer = MortalTrainer(plan, args, turn)
        try:
            if trainer.learned.next_step < plan.steps:
                trainer.train()
        except SlipstreamError as error:
            if error.reason is not Reason.INCARNATION_STALE:
                raise
            say(f"{plan.name}: was taken over")
            return FENCED
    return 0


@contextmanager
def turn_of(directory: Path) -> Iterator[int]:
    """A lock that a trainer holds while it lives."""
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory / "turn.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def read_checkpoint(path: Path) -> Learned:
    """What is on the disk; a new run where nothing is."""
    if not path.exists():
        return Learned()
    saved = json.loads(path.read_text())
    saved["steps"] = [(step, {int(number): crc for number, crc in packs.items()}) for step, packs in saved["steps"]]
    return Learned(**saved)


def checksum_of(tensors: object) -> int:
    """Of all bytes that a trainer gets of a pack."""
    assert isinstance(tensors, dict)
    names = sorted(name for name in tensors if not name.startswith("anchor"))
    return checksum(torch.cat([tensors[name].contiguous().flatten().view(torch.uint8) for name in names]).numpy())


def append(path: Path, line: str) -> None:
    """In one write, so that a line is there or not."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(descriptor, f"{line}\n".encode())
    os.close(descriptor)


def say(line: str) -> None:
    """One line on stdout, from any of the processes."""
    os.write(1, f"{line}\n".encode())


def fork_trainer(plan: RunPlan, args: argparse.Namespace) -> int:
    """Start a trainer; returns its process id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        status = live(plan, args)
    except BaseException:  # noqa: BLE001 - the process's boundary
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(status)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True)
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--ledger", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--packs", type=int, required=True)
    args = parser.parse_args()
    configure_logging("mortal-trainers", level="info", json=False)
    plans = plan_runs(args.seed, args.packs)
    alive: dict[int, RunPlan] = {}
    try:
        for plan in [each for each in plans for _ in range(TRAINERS_PER_RUN)]:
            alive[fork_trainer(plan, args)] = plan
        while alive:
            child, wait_status = os.wait()
            plan, status = alive.pop(child), os.waitstatus_to_exitcode(wait_status)
            if status in (-signal.SIGKILL, FENCED):
                alive[fork_trainer(plan, args)] = plan
            elif status != 0:
                say(f"a trainer of {plan.name} ended with {status}")
                return 1
    finally:
        for child in alive:
            os.kill(child, signal.SIGKILL)
    return 0


if __name__ == "__main__":
    with sigterm_as_exit():
        sys.exit(main())
