"""What lies between target server and trainers: bytes per second of each transport, round trips of each step.

    python -m benchmarks.transport --out DIR --leave-by 120

A real target server process with a tiny model on the CPU. Bytes: its probe payload, read by another process over `shm`
and over `grpc`, in turns with a single-thread memcpy of the same size in that process. Round trips: lease + confirm +
commit of packs that lie on the shelf, by one trainer process and by eight, each with a run of its own; a trainer that
takes no time to train, and one that begins a step every 100 ms.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.results_file import RESULTS, Row, spread, write_results
from benchmarks.served import target_server
from benchmarks.target_workload import SHAPES
from benchmarks.worker_process import WorkerFailedError, WorkerProcess
from slipstream.child_processes import sigterm_as_exit

LIMIT_MILLISECONDS = 3.0
GRPC_FLOOR, GRPC_GOAL = 0.08, 0.15
TRIPS_FLOOR, TRIPS_GOAL = 1.0, 3.0
ROUNDS = 5
STEP_SECONDS = 0.1
CASES = ((1, 0.0), (8, STEP_SECONDS), (8, 0.0))
"""Trainers, and how often each begins a step."""
ANSWER_SECONDS = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("bytes", "trips"), default=["bytes", "trips"])
    parser.add_argument("--probe-bytes", default="256MiB", help="payload of the bytes; default: %(default)s")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement; default: %(default)g")
    parser.add_argument("--leave-by", type=float, default=300.0, help="seconds from now; what is left out is said")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--note", default="", help="what else the machine did, for whoever reads the results")
    parser.add_argument("--commit", help="for machines without the repository")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    load_before = os.getloadavg()[0]
    with sigterm_as_exit(), tempfile.TemporaryDirectory() as directory:
        try:
            answers = measure(args, Path(directory))
        except WorkerFailedError as error:
            raise SystemExit(str(error)) from None
    rows = [row for answer in answers for row in rows_of(answer)]
    sys.stdout.write(table(rows, answers))
    if rows:
        for answer in answers:
            answer.pop("milliseconds", None)  # thousands of numbers, of which the rows say enough
        settings = {key: str(value) for key, value in vars(args).items()}
        extra = {"answers": answers, "settings": settings, "load_average_before": load_before}
        sys.stdout.write(f"{write_results('transport', rows, commit=args.commit, extra=extra, directory=args.out)}\n")
    return 0 if rows else 1


def measure(args: argparse.Namespace, directory: Path) -> list[dict[str, Any]]:
    """The workers' answers; what failed or was left out says so."""
    from benchmarks.random_target import write_documents, write_target

    deadline = time.monotonic() + args.leave_by
    model = write_target(SHAPES["tiny"], directory / "model", "cpu")
    data = write_documents(SHAPES["tiny"], directory / "documents.jsonl")
    serve = ["--model", str(model), "--set", "target.dtype=float32", "--device", "cpu", "--threads", "1"]
    serve += ["--probe-bytes", args.probe_bytes]
    asked: list[dict[str, Any]] = [{"what": "bytes"}] if "bytes" in args.parts else []
    if "trips" in args.parts:
        asked += [{"what": "trips", "trainers": count, "step_seconds": seconds} for count, seconds in CASES]
    answers = []
    with target_server(serve, directory, args.out / "transport-server.log") as served:
        for number, each in enumerate(asked):
            if deadline - time.monotonic() < 6 * args.seconds:
                answers.append(each | {"failed": "left out: no time"})
                continue
            try:
                answers.append(each | ask(each, args, served.address, data, f"case-{number}"))
            except WorkerFailedError as error:
                answers.append(each | {"failed": str(error)})
    return answers


def ask(asked: dict[str, Any], args: argparse.Namespace, address: str, data: Path, name: str) -> dict[str, Any]:
    """Run the workers of one case to their end."""
    command = ["benchmarks.transport_worker", asked["what"], "--address", address, "--data", str(data)]
    trainers = asked.get("trainers", 1)
    with ExitStack() as leaving:
        workers = [
            leaving.enter_context(
                WorkerProcess([*command, "--run", f"{name}-{index}"], args.out / f"transport-{name}-{index}.log")
            )
            for index in range(trainers)
        ]
        patience = ANSWER_SECONDS + 10 * args.seconds
        if asked["what"] == "bytes":
            return workers[0].ask(patience, seconds=args.seconds / ROUNDS, rounds=ROUNDS)
        trips = {"seconds": args.seconds, "step_seconds": asked["step_seconds"]}
        with ThreadPoolExecutor(trainers) as pool:
            answers = list(pool.map(lambda worker: worker.ask(patience, **trips), workers))
    return {
        "milliseconds": sorted(each for answer in answers for each in answer["milliseconds"]),
        "medians": [answer["median"] for answer in answers],
    }


def rows_of(answer: dict[str, Any]) -> list[Row]:
    """The rows that one case gives."""
    if "failed" in answer:
        return []
    if answer["what"] == "bytes":
        return _rows_of_bytes(answer["gigabytes_per_second"], answer["payload_bytes"])
    case = _in_words(answer)
    times = answer["milliseconds"]
    metric = "{}, 3 ms ÷ lease + confirm + commit"
    floor, goal = (TRIPS_FLOOR, TRIPS_GOAL) if answer["trainers"] == 8 else (None, None)
    rows = []
    for name, share, wanted in (("p50", 0.5, (floor, goal)), ("p99", 0.99, (None, None))):
        found = times[min(len(times) - 1, round(share * (len(times) - 1)))]
        limit = LIMIT_MILLISECONDS
        rows.append(Row(case, metric.format(name), "ms", found, limit, "limit", limit / found, None, *wanted))
    return rows


def _rows_of_bytes(rates: dict[str, list[float]], size: int) -> list[Row]:
    rows = []
    for name, floor, goal in (("shm", None, None), ("grpc", GRPC_FLOOR, GRPC_GOAL)):
        ratios = [ours / base for ours, base in zip(rates[name], rates["memcpy"], strict=True)]
        rows.append(
            Row(
                f"{name}, one host, {size / 2**20:.0f} MiB payloads to CPU memory",
                f"bytes/s, {name} ÷ single-thread memcpy",
                "GB/s",
                statistics.median(rates[name]),
                statistics.median(rates["memcpy"]),
                "np.copyto of as many bytes, same process, in turns",
                statistics.median(ratios),
                spread(ratios),
                floor,
                goal,
            )
        )
    return rows


def _in_words(answer: dict[str, Any]) -> str:
    if answer["what"] == "bytes":
        return "bytes"
    trainers, seconds = answer["trainers"], answer["step_seconds"]
    pace = f"a step every {1000 * seconds:.0f} ms" if seconds else "without a pause"
    return f"{trainers} trainer{'s' if trainers > 1 else ''}, {pace}"


def table(rows: Sequence[Row], answers: Sequence[dict[str, Any]]) -> str:
    """Short, for people."""
    lines = []
    for row in rows:
        wanted = "" if row.floor is None else f"  floor {row.floor:g}, goal {row.goal:g}"
        lines.append(f"{row.case:48} {row.metric:42} {row.ours:9.3f} {row.unit:5} ratio {row.ratio:6.2f}{wanted}")
    lines += [f"{_in_words(answer)}: {answer['failed']}" for answer in answers if "failed" in answer]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
