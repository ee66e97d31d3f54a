"""The training benchmark: what it counts as work, that all sides do the same work, and what its table says."""

import dataclasses
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.flops import step_flops, total_tflop
from benchmarks.kernel_parts import group, part_of
from benchmarks.peers.ours import OurSide
from benchmarks.peers.side import Side, SideUnavailableError
from benchmarks.peers.stand_ins import STAND_INS, install_stand_ins
from benchmarks.peers.workload import (
    DECAY_GAMMA,
    ROPE_THETA,
    SIZES,
    TINY,
    Size,
    drafter_weights,
    frozen_weights,
    make_pack,
)
from benchmarks.train_step_rows import Measured, make_rows, table
from slipstream.plan.cost import step_flop
from tests.fakes.dense_reference import Sizes, blocks_of, hidden_of_pack, loss_of_blocks
from tests.fakes.drafter_cases import anchor_list, as_lists
from tests.unit.plan import sizes

CPU = torch.device("cpu")
SMALL = dataclasses.replace(TINY, tokens=128, anchors=6, layers=2)
REAL = dataclasses.replace(SMALL, tokens=1536, anchors=24, real_documents=True)
REAL_2 = dataclasses.replace(REAL, batch_rows=2)


def test_size_a_is_75_7_tflop() -> None:
    assert total_tflop(SIZES["A"]) == pytest.approx(75.7, abs=0.05)


def test_a_term_of_the_work_by_hand() -> None:
    # 512 anchors of 16 slots through a frozen head of 4096 x 151,936: forward and gradient of the input.
    assert step_flops(SIZES["A"])["head"] == pytest.approx(2 * 2 * 8192 * 4096 * 151_936 / 1e12)
    assert step_flops(SIZES["A"], strict=True)["head"] == pytest.approx(2 * 2 * 7680 * 4096 * 151_936 / 1e12)


def test_the_plan_counts_the_same_work() -> None:
    tera = {term: flop / 1e12 for term, flop in step_flop(sizes.A).items()}
    assert tera == pytest.approx(step_flops(SIZES["A"]))


def reference_loss(size: Size, number: int) -> float:
    """Of the first step, in float64, block by block."""
    pack = make_pack(size, CPU, number, split_features=False)
    rows = as_lists(dict(pack.tensors))
    frozen = frozen_weights(size, CPU)
    sizes = Sizes(size.layers, size.heads, size.kv_heads, size.head_dim, 1e-6, ROPE_THETA, (None,) * size.layers)
    weights = {name: weight.double() for name, weight in drafter_weights(size, CPU).items()}
    blocks = blocks_of(rows, anchor_list(pack.anchors), size.block_size, size.vocab - 1)
    assert pack.features is not None
    hidden = hidden_of_pack(weights, sizes, rows, pack.features.double(), blocks, frozen.embedding.double())
    sums = loss_of_blocks(hidden, blocks, frozen.head.double(), ("decay", DECAY_GAMMA, None))
    return float(sums.numerator / sums.weight)


def first_loss(side: Side, size: Size, number: int) -> float:
    side.step(make_pack(size, CPU, number, split_features=side.split_features))
    return side.last_loss()


@pytest.mark.parametrize("size", [SMALL, REAL], ids=["equal documents", "real lengths"])
def test_our_side_has_the_loss_of_the_dense_reference(size: Size) -> None:
    assert first_loss(OurSide(size, CPU), size, 1) == pytest.approx(reference_loss(size, 1), rel=1e-5)


def test_padded_batches_hold_the_documents_and_anchors_of_their_pack() -> None:
    pack = make_pack(REAL_2, CPU, 1, split_features=False)
    documents = pack.tensors["document_ids"]
    starts = [int((documents == number).nonzero()[0]) for number in range(int(documents.max()) + 1)]
    assert [len(batch.input_ids) for batch in pack.batches] == [2] * (len(starts) // 2) + [1] * (len(starts) % 2)
    assert len(starts) >= 3 and len({len(batch.input_ids[0]) for batch in pack.batches}) > 1
    anchored = []
    for batch, first in zip(pack.batches, range(0, len(starts), 2), strict=True):
        for row, start in enumerate(starts[first : first + 2]):
            length = int((documents == first + row).sum())
            part = pack.tensors["input_ids"][start : start + length].long()
            assert torch.equal(batch.input_ids[row, :length], part)
            assert not batch.loss_mask[row, length:].any()
            anchored += (batch.anchors.positions[row][batch.anchors.valid[row]] + start).tolist()
    assert anchored == pack.anchors.positions[pack.anchors.valid].tolist()


def specforge(size: Size, device: torch.device) -> Side:
    from benchmarks.peers.specforge import SpecForgeSide

    return SpecForgeSide(size, device)


def speculators(size: Size, device: torch.device) -> Side:
    from benchmarks.peers.speculators import SpeculatorsSide

    return SpeculatorsSide(size, device)


@pytest.mark.parametrize(
    ("package", "make", "size"),
    [
        ("specforge", specforge, SMALL),
        ("specforge", specforge, REAL),
        ("specforge", specforge, REAL_2),
        ("speculators", speculators, SMALL),
    ],
    ids=["specforge", "specforge, one padded batch", "specforge, batches of two", "speculators"],
)
def test_a_peer_has_the_same_loss(package: str, make: Callable[[Size, torch.device], Side], size: Size) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install --no-deps {package}")
    assert first_loss(make(size, CPU), size, 1) == pytest.approx(reference_loss(size, 1), rel=1e-5)


def test_a_stand_in_can_be_imported_and_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = {"slipstream_no_such_package": "nothing needs it", "json": "is installed"}
    monkeypatch.setitem(STAND_INS, "a peer", reasons)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    assert install_stand_ins("a peer") == ["slipstream_no_such_package"]
    part = importlib.import_module("slipstream_no_such_package.part")
    del sys.modules["slipstream_no_such_package.part"], sys.modules["slipstream_no_such_package"]

    class Subclass(part.Base):  # type: ignore[name-defined]
        pass

    with pytest.raises(SideUnavailableError, match=r"slipstream_no_such_package\.part\.read.*stand-in"):
        part.read("a file")


@pytest.mark.timeout(240)
def test_a_peer_that_is_not_installed_is_a_row(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.train_step", "--device", "cpu", "--sizes", "tiny", "--steps", "3"]
    command += ["--variants", "ours,specforge", "--out", str(tmp_path)]
    path = os.pathsep.join(entry for entry in sys.path if not (Path(entry or ".") / "specforge").is_dir())
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=True)
    assert "failed: specforge 0.2.0 cannot be imported" in answer.stdout
    sides = json.loads((tmp_path / "train_step_tiny.json").read_text())["sides"]
    assert [side["variant"] for side in sides] == ["ours", "specforge"]
    assert len(sides[0]["milliseconds"]) >= 3


def measured(size: str, variant: str, milliseconds: float, ratios: list[float], failed: str | None = None) -> Measured:
    return Measured(
        size,
        variant,
        failed,
        build={"losses": [12.0]},
        milliseconds=[milliseconds] * 8,
        memory={"allocated_gib": 20.0, "reserved_gib": 22.0},
        ratios=ratios,
    )


def test_ratios_are_taken_of_the_same_round_and_meet_their_floors() -> None:
    sides = [
        measured("A", "ours", 130.0, []),
        measured("A", "ours-fp8", 104.0, [0.8, 0.8, 0.8]),
        measured("A", "specforge", 195.0, [1.5, 1.4, 1.6]),
        Measured("A", "speculators", failed="not installed"),
    ]
    rows = make_rows(sides, 800.0)
    ratios = {(row.case, row.metric): (row.ratio, row.floor) for row in rows if row.ratio is not None}
    assert ratios["A, ours", "specforge step time ÷ ours"] == (1.5, 1.4)
    assert ratios["A, ours-fp8", "specforge step time ÷ ours-fp8"] == (1.5 / 0.8, 1.7)
    share, floor = ratios["A, ours", "nominal TFLOP/s ÷ measured matmul peak"]
    assert share == pytest.approx(75.7 / 0.130 / 800, rel=1e-3)
    assert floor == 0.68
    text = table(sides, rows, 800.0)
    assert "speculators          failed: not installed" in text
    assert "specforge step time ÷ ours = 1.50 (rounds differ by 13.3%)  floor 1.4, goal 1.6  ok" in text


def test_other_work_is_said() -> None:
    sides = [measured("A", "ours", 130.0, []), measured("A", "specforge", 195.0, [1.5])]
    sides[1].build["losses"] = [12.5]
    assert "LOSS DIFFERS" in table(sides, make_rows(sides, None), None)


def test_kernels_are_grouped_by_name() -> None:
    assert part_of("triton_tem_fused_flex_attention_backward_12") == "attention"
    assert part_of("nvjet_tst_128x256_64x4_2x1_v_bz_TNT") == "products"
    assert part_of("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>") == "optimizer"
    assert part_of("triton_red_fused_rms_norm_3") == "rest"
    parts = group([("nvjet_a", 4000.0, 8), ("triton_poi_b", 2000.0, 2)], steps=2)
    assert parts["ms_by_part"] == {"attention": 0.0, "products": 2.0, "optimizer": 0.0, "rest": 1.0}
    assert parts["kernels_per_step"] == 5
