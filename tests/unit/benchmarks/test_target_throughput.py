"""The target's benchmark: its documents are those of its origin, and its ratios are turned the right way."""

import numpy as np

from benchmarks.target_throughput import rows_of, table
from benchmarks.target_workload import PACK_TOKENS, SHAPES, document_lengths, real_batches, real_packs


def test_lengths_are_those_of_the_origin() -> None:
    lengths = document_lengths(20_000)
    assert lengths.min() >= 1 and lengths.max() < 1100
    assert abs(np.median(lengths) - 310) < 8
    assert abs(lengths.mean() - 2_647_601 / 7_486) < 8


def test_packs_are_full_and_batches_are_not() -> None:
    packs, batches = real_packs(6), real_batches(12)
    assert len(packs) == 6 and min(map(sum, packs)) > 0.97 * PACK_TOKENS
    useful = sum(map(sum, batches)) / sum(len(batch) * max(batch) for batch in batches)
    assert [len(batch) for batch in batches] == [8] * 12 and 0.3 < useful < 0.7


def test_ratios_and_what_failed() -> None:
    rates = {"ours": [30.0, 20.0, 22.0], "theirs": [10.0, 10.0, 10.0]}
    asked = {"what": "forward", "size": "qwen3-8b", "compile": "true"}
    forward = asked | {
        "even": rates, "real": rates, "launch_ms": {"launched": 1.0, "computed": 2.0}, "compile_seconds": 3.0,
        "recorded": False,
    }  # fmt: skip
    served = asked | {"what": "serve", "packs_per_second": 9.0, "forward": {"packs_per_second": [10.0, 11.0, 9.0]}}
    failed = asked | {"what": "serve", "size": "smollm2-135m", "failed": "ended with 1"}
    served |= {"engine_ms": {"launch": 1.0}, "feeder_ms": {"read": 1.0, "copy": 2.0}, "training_ms": {"waited": 3.0}}
    served |= {"transport": "shm", "gpu_ms": {"compute": 1.5, "idle": 0.1}}
    rows = [row for answer in (forward, served, failed) for row in rows_of(answer)]
    assert [(row.ratio, row.floor, row.goal) for row in rows] == [(2.2, 1.4, 1.6), (2.2, 2.2, 2.8), (0.9, 0.95, 0.98)]
    text = table(rows, [forward, served, failed])
    assert "ratio  2.20  floor 1.4, goal 1.6" in text
    assert (
        "engine launch 1; its GPU compute 1.5, idle 0.1; feeder copy 2, read 1; training thread waited 3; shm" in text
    )
    assert "serve smollm2-135m compile=true: ended with 1" in text
    assert all(row.floor is None for row in rows_of(forward | {"compile": "false"})), "floors are for what runs use"


def test_captured_layers_exist() -> None:
    assert all(max(shape.layer_ids) < shape.config["num_hidden_layers"] for shape in SHAPES.values())
