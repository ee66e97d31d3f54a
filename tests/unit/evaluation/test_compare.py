"""The evaluation as a whole on a tiny target: tallies, report, table."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from drafter_trainer.evaluation.compare import PLAIN, Comparison, compare
from drafter_trainer.evaluation.prompt_decoder import PromptDecoder
from drafter_trainer.evaluation.prompts import Prompt
from drafter_trainer.evaluation.report import print_report, to_dict, write_report
from slipstream.target_loading import LoadedTarget
from tests.unit.evaluation.test_decode import random_drafter

SETTINGS = {"dtype": "float32", "gap_bound": 0.0}


def prompts(*sources: str) -> list[Prompt]:
    return [
        Prompt(f"{source}-{i}", source, ({"role": "user", "content": f"What is the number {i}?"},))
        for i, source in enumerate(sources)
    ]


def decode_all(target: LoadedTarget, chosen: list[Prompt], max_new_tokens: int) -> Comparison:
    decoder = PromptDecoder(target, {"trained": random_drafter(target)}, max_new_tokens)
    return compare(((prompt, decoder.decode(prompt)) for prompt in chosen), ["trained"], 0.0)


def test_every_prompt_is_counted_under_its_source_and_way(tiny_target: LoadedTarget) -> None:
    comparison = decode_all(tiny_target, prompts("math", "code", "math"), 10)
    assert comparison.lossless
    assert {source: tally.prompts for source, tally in comparison.tallies["trained"].items()} == {"math": 2, "code": 1}
    plain = comparison.tallies[PLAIN]["math"]
    assert plain.accepted_length == 1.0 and plain.rounds == plain.tokens
    trained = comparison.tallies["trained"]["math"]
    assert trained.tokens == plain.tokens
    assert trained.accepted_length == pytest.approx(trained.tokens / trained.rounds)


def test_report_adds_sources_up_and_the_table_says_lossless(tiny_target: LoadedTarget, tmp_path: Path) -> None:
    comparison = decode_all(tiny_target, prompts("math", "code"), 6)
    write_report(tmp_path / "out" / "eval.json", to_dict(comparison, SETTINGS))
    report = json.loads((tmp_path / "out" / "eval.json").read_text())
    rows = report["results"]["trained"]
    assert rows["all"]["rounds"] == rows["math"]["rounds"] + rows["code"]["rounds"]
    assert len(rows["all"]["acceptance_by_position"]) == 3
    out = io.StringIO()
    print_report(report, Console(file=out, width=160))
    assert "Lossless" in out.getvalue() and "math" in out.getvalue()
