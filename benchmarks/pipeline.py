"""Target server and trainers together: who waits for whom, what sharing costs, how fast the ring is, what memory does.

    python -m benchmarks.pipeline --out DIR --leave-by 500
    python -m benchmarks.pipeline --device cpu --model tiny --tokens 10M

wait         server and trainer on one device; the share of a step that the trainer waits for packs
subscribers  three processes that read one stream, against one; the target is the bottleneck
ring         packs from the device through shared memory to another process's device, against plain copies
memory       with --tokens: both processes' memory while a run trains so many tokens

The server with one subscriber against its forward alone is in benchmarks/target_throughput.py.
"""

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import memory_slope
from benchmarks.first_light import card_memory
from benchmarks.pipeline_rows import aggregate_rate, growth_of, rows_of, steady, table, trainer_pace
from benchmarks.pipeline_setup import NO_GPU, Setup, Trainer, environment_of, set_up
from benchmarks.results_file import RESULTS, write_results
from benchmarks.served import target_server
from benchmarks.target_workload import SHAPES
from benchmarks.worker_process import WorkerFailedError, WorkerProcess
from slipstream.child_processes import sigterm_as_exit

READERS = 3
APART_PACKS = 500
"""Between the beginnings of two measurements: what one has read and lies on the shelf is not to be had by the next."""
SAMPLE_SECONDS = 1.0
LEAST_SAMPLES = 40
KEPT_SAMPLES = 100
"""In the results: enough to draw the curve."""
ANSWER_SECONDS = 240.0
"""How long a process may take to its first answer: the target reads the data, and compiles."""
WARM_UP_SECONDS = 240.0
"""How long a trainer may take to its first steps: it compiles."""
MEMORY_SETTINGS = (
    "data.pack_tokens=4096",
    "drafter.num_layers=1",
    "train.anchors_per_pack=16",
    "checkpoint.every_steps=100",
)
"""Of a CPU's run for memory: many steps in little time, and the first checkpoints within the warm-up."""
LARGE_BLOCKS_MAPPED = {
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "MALLOC_TRIM_THRESHOLD_": "131072",
    "MALLOC_ARENA_MAX": "2",
}
"""For glibc: its heap would grow and shrink by several MiB with the order in which tensors come and go, and a leak of a
tenth of that would not be seen. This way it holds little more than what is in use."""


def main() -> int:
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    load_before = os.getloadavg()[0]
    with sigterm_as_exit(), tempfile.TemporaryDirectory(prefix="pipeline-") as directory:
        answers = measure(args, Path(directory))
    rows = [row for answer in answers for row in rows_of(answer)]
    sys.stdout.write(table(answers))
    if rows:
        settings = {key: str(value) for key, value in vars(args).items()}
        extra = {"answers": answers, "settings": settings, "load_average": [load_before, os.getloadavg()[0]]}
        # Of its own: it takes much longer than the rest, and neither is to overwrite the other.
        name = "pipeline_memory" if args.parts == ["memory"] else "pipeline"
        path = write_results(name, rows, commit=args.commit, extra=extra, directory=args.out)
        sys.stdout.write(f"{path}\n")
    grows = [row for row in rows if "growth" in row.metric and row.ratio is not None and row.ratio < 1.0]
    return 1 if grows or not rows else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", choices=tuple(PARTS), default=["wait", "subscribers", "ring"])
    parser.add_argument("--tokens", type=tokens, help="adds the part memory: train so many, e.g. 10M")
    shapes = ", ".join(SHAPES)
    parser.add_argument("--model", default="smollm2-135m", help=f"drawn weights of {shapes}; or a directory")
    parser.add_argument("--recipe", type=Path, help="of the trainer; default: smollm2-135m-1gpu, on a CPU a tiny one")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--shared-model", help="of the part subscribers; default: qwen3-1.7b, on a CPU small")
    parser.add_argument("--pack-mib", type=int, help="of the part ring; default: 480, on a CPU 32")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement; default: %(default)g")
    parser.add_argument("--rounds", type=int, default=3, help="of each comparison; default: %(default)s")
    parser.add_argument("--leave-by", type=float, default=900.0, help="seconds from now; what is left out is said")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--note", default="", help="what else the machine did, for whoever reads the results")
    parser.add_argument("--commit", help="for machines without the repository")
    args = parser.parse_args()
    if args.tokens is not None and "memory" not in args.parts:
        args.parts.append("memory")
    if problem := _problem(args):
        parser.error(problem)
    return args


def tokens(text: str) -> int:
    """`10M`, `300k`, or plain."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kM]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens; write 10M or 300k")
    return round(float(match.group(1)) * {"": 1, "k": 1e3, "M": 1e6}[match.group(2)])


def _problem(args: argparse.Namespace) -> str | None:
    if "memory" in args.parts and args.tokens is None:
        return "the part memory needs --tokens"
    if args.model not in SHAPES and not Path(args.model).is_dir():
        return f"--model {args.model} is neither a directory nor one of {', '.join(SHAPES)}"
    if args.device == "cpu":
        return None
    import torch

    return None if torch.cuda.is_available() else "torch finds no GPU; try --device cpu --model tiny"


def measure(args: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    """The parts' answers; what failed or was left out says so."""
    deadline = time.monotonic() + args.leave_by
    answers = []
    for part in args.parts:
        began = time.monotonic()
        directory = work / part
        directory.mkdir()
        try:
            answer = PARTS[part](args, directory, deadline)
        except WorkerFailedError as error:
            answer = {"failed": str(error)}
        answers.append({"what": part, **answer, "part_seconds": round(time.monotonic() - began, 1)})
        sys.stderr.write(f"{part}: {answer.get('failed', 'done')} after {answers[-1]['part_seconds']} s\n")
    return answers


def another_round(done: int, args: argparse.Namespace, began: float, deadline: float) -> bool:
    """Whether there is time for one more, if it takes as long as those before.

    Raises:
        WorkerFailedError: there is no time even for the first.
    """
    now = time.monotonic()
    if not done and deadline - now < 4 * args.seconds:
        raise WorkerFailedError("left out: no time")
    return not done or (done < args.rounds and deadline - now > 1.2 * (now - began) / done)


# ---- the parts ----


def measure_wait(args: argparse.Namespace, work: Path, deadline: float) -> dict[str, Any]:
    """By turns: packs per second of the target alone, and the pace of a trainer that it feeds."""
    setup = set_up(args.model, args, work)
    alone: list[float] = []
    paces: list[dict[str, float]] = []
    transport = ""
    log = args.out / "pipeline-wait-server.log"
    with ExitStack() as leaving:
        served = leaving.enter_context(target_server(setup.serve(), work, log, setup.environment))
        subscribe = setup.subscribe(served.address)
        reader = leaving.enter_context(WorkerProcess(subscribe, args.out / "pipeline-wait-reader.log", NO_GPU))
        began = time.monotonic()
        while another_round(len(paces), args, began, deadline):
            answer = reader.ask(ANSWER_SECONDS, run=f"alone-{len(paces)}", seconds=args.seconds)
            alone.append(aggregate_rate([answer["committed"]]))
            transport = answer["transport"]
            paces.append(trainer_pace(train(setup, args, served.address, f"run-{len(paces)}", deadline)))
    return {
        "case": f"{setup.title}, server and trainer on one {'GPU' if args.device == 'cuda' else 'machine'}",
        "pack_tokens": setup.pack_tokens,
        "target_packs_per_second": alone,
        "trainer": paces,
        "transport": transport,
    }


def train(setup: Setup, args: argparse.Namespace, address: str, name: str, deadline: float) -> list[dict[str, Any]]:
    """The records of a run that is ended once it has trained for long enough after its warm-up."""
    log = args.out / f"pipeline-wait-{name}.log"
    with Trainer(setup, address, name, log, ("train.max_tokens=", "train.max_steps=1000000")) as trainer:
        give_up = min(deadline, time.monotonic() + WARM_UP_SECONDS + 10 * args.seconds)
        while sum(record["seconds"] for record in steady(trainer.records())) < args.seconds:
            if not trainer.runs():
                raise WorkerFailedError(f"the trainer ended: see {log.name}")
            if time.monotonic() > give_up:
                raise WorkerFailedError(f"the trainer did not train in time: see {log.name}")
            time.sleep(0.5)
        return trainer.records()


def measure_subscribers(args: argparse.Namespace, work: Path, deadline: float) -> dict[str, Any]:
    """By turns: packs per second of one reader, and of three that begin together."""
    setup = set_up(args.shared_model or ("small" if args.device == "cpu" else "qwen3-1.7b"), args, work)
    rates: dict[str, list[float]] = {"one": [], "three": []}
    waited: list[float] = []
    first_step = 0
    server_log = args.out / "pipeline-subscribers-server.log"
    with ExitStack() as leaving:
        served = leaving.enter_context(target_server(setup.serve(), work, server_log, setup.environment))
        readers = [
            leaving.enter_context(
                WorkerProcess(setup.subscribe(served.address), args.out / f"pipeline-reader-{number}.log", NO_GPU)
            )
            for number in range(READERS)
        ]
        pool = leaving.enter_context(ThreadPoolExecutor(READERS))
        # Not counted: a small target's forward is recorded for one shape of packs after the other.
        readers[0].ask(ANSWER_SECONDS, run="warm-up", seconds=args.seconds)
        began = time.monotonic()
        while another_round(len(rates["three"]), args, began, deadline):
            for name, chosen in (("one", readers[:1]), ("three", readers)):
                group = f"{name}-{len(rates[name])}"
                asked = {"seconds": args.seconds, "group": group, "group_size": len(chosen), "first_step": first_step}
                first_step += APART_PACKS

                def ask(number: int, asked: dict[str, Any] = asked, group: str = group) -> dict[str, Any]:
                    return readers[number].ask(ANSWER_SECONDS, run=f"{group}-{number}", **asked)

                answers = list(pool.map(ask, range(len(chosen))))
                rates[name].append(aggregate_rate([answer["committed"] for answer in answers]))
                waited += [answer["waited_seconds"] / args.seconds for answer in answers]
    case = f"{setup.title}, packs of {setup.pack_tokens}, {answers[0]['transport']}"
    return {"case": case, **rates, "shares_of_waiting_for_the_target": waited}


def measure_ring(args: argparse.Namespace, _work: Path, deadline: float) -> dict[str, Any]:
    """By turns: plain copies in both directions at once, and packs through the ring."""
    pack_mib = args.pack_mib or (32 if args.device == "cpu" else 480)
    rates: dict[str, list[float]] = {"plain_write": [], "plain_read": [], "ring": []}
    with ExitStack() as leaving:
        # Short: the path of a socket has about a hundred characters.
        socket = Path(leaving.enter_context(tempfile.TemporaryDirectory(prefix="ring-"))) / "socket"
        flags = ["--device", args.device, "--pack-mib", str(pack_mib), "--socket", str(socket)]
        ends, locked = [], {}
        for end in ("write", "read"):
            command = ["benchmarks.ring_worker", end, *flags]
            log = args.out / f"pipeline-ring-{end}.log"
            ends.append(leaving.enter_context(WorkerProcess(command, log, environment_of(args.device))))
            if end == "write":
                ends[0].answer(ANSWER_SECONDS)  # it listens: the reader may come
        for end, worker in zip(("write", "read"), ends, strict=True):
            locked[end] = worker.answer(ANSWER_SECONDS)["page_locked"]
        pool = leaving.enter_context(ThreadPoolExecutor(2))

        def both(how: str) -> list[dict[str, Any]]:
            patience = ANSWER_SECONDS + args.seconds
            return list(pool.map(lambda end: end.ask(patience, how=how, seconds=args.seconds), ends))

        began = time.monotonic()
        while another_round(len(rates["ring"]), args, began, deadline):
            out, back = both("plain")
            rates["plain_write"].append(out["bytes_per_second"])
            rates["plain_read"].append(back["bytes_per_second"])
            rates["ring"].append(both("ring")[1]["bytes_per_second"])
    way = "GPU → ring → another process's GPU" if args.device == "cuda" else "memory → ring → another process's memory"
    return {"case": f"shm, {pack_mib} MiB, {way}", "device": args.device, "page_locked": locked, **rates}


def measure_memory(args: argparse.Namespace, work: Path, deadline: float) -> dict[str, Any]:
    """Memory of server and trainer, sampled while a run trains --tokens."""
    if problem := memory_slope.why_not_here():
        raise WorkerFailedError(problem)
    setup = set_up(args.model, args, work, MEMORY_SETTINGS if args.device == "cpu" else ())
    setup = replace(setup, environment={**setup.environment, **LARGE_BLOCKS_MAPPED})
    samples: list[dict[str, float]] = []
    log = args.out / "pipeline-memory-trainer.log"
    with (
        target_server(setup.serve(), work, args.out / "pipeline-memory-server.log", setup.environment) as served,
        Trainer(
            setup, served.address, "memory", log, ("train.max_steps=", f"train.max_tokens={args.tokens}")
        ) as trainer,
    ):
        while trainer.runs():
            if time.monotonic() > deadline:
                raise WorkerFailedError(f"left off after {trainer.tokens()} tokens: no time")
            if (trained := trainer.tokens()) > 0:
                sample = sample_of({"target server": served.process.pid, "trainer": trainer.pid})
                if sample:
                    samples.append({"tokens": trained, **sample})
            time.sleep(SAMPLE_SECONDS)
        if trainer.status() != 0:
            raise WorkerFailedError(f"the trainer ended with {trainer.status()}: see {log.name}")
        trained = trainer.tokens()
    # When the last step is done, the trainer begins to give its memory back.
    samples = [sample for sample in samples if sample["tokens"] < trained]
    if len(samples) < LEAST_SAMPLES:
        raise WorkerFailedError(f"{len(samples)} samples are too few for a slope: train for longer than {args.tokens}")
    case = f"{setup.title}, {trained / 1e6:.1f} M tokens in packs of {setup.pack_tokens}"
    return {"case": case, "growth": growth_of(samples), "samples": samples[:: max(1, len(samples) // KEPT_SAMPLES)]}


def sample_of(processes: dict[str, int]) -> dict[str, float]:
    """MiB now; empty when one of the processes has ended."""
    sample: dict[str, float] = {}
    for name, pid in processes.items():
        try:
            sample |= {f"{name}, {kind}": mib for kind, mib in memory_slope.process_memory(pid).items()}
        except OSError:
            return {}
    card = card_memory()
    # Of both: in a container the driver does not say which process holds how much.
    return sample if card is None else sample | {"GPU memory of the card": card}


Part = Callable[[argparse.Namespace, Path, float], dict[str, Any]]
PARTS: dict[str, Part] = {
    "wait": measure_wait,
    "subscribers": measure_subscribers,
    "ring": measure_ring,
    "memory": measure_memory,
}

if __name__ == "__main__":
    sys.exit(main())
