"""Answers are those of their prompts, whatever is decoded beside them and in whichever order; how many at once."""

import json
from pathlib import Path

import pytest

from slipstream.run_spec.spec import TargetSpec
from slipstream.target_loading import LoadedTarget, load_causal_lm
from target_server.regeneration import BATCH_ON_CPU, BATCH_ON_GPU, Asked, Regenerator, Sampling, default_batch
from tests.fakes.served_model import write_tiny_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedTarget:
    directory = write_tiny_target(tmp_path_factory.mktemp("target"))
    return load_causal_lm(TargetSpec(model=str(directory), dtype="float32"), "cpu")


def test_sorted_by_length_every_prompt_keeps_its_answer(target: LoadedTarget) -> None:
    lengths = [9, 2, 31, 4, 17, 2, 25, 8, 3, 12, 40]
    asked = [Asked(f"p{number}", [7 + number, *range(3, 2 + length)]) for number, length in enumerate(lengths)]
    alone = Regenerator(target, Sampling(16, batch=1))
    expected = [alone.answer([prompt], number)[0] for number, prompt in enumerate(asked)]
    assert len({tuple(answer.token_ids) for answer in expected}) > 1, "else this test shows nothing"
    sizes: list[list[int]] = []
    together = Regenerator(target, Sampling(16, batch=4))
    generate = together._generate

    def seen(prompts: list[list[int]]) -> object:
        sizes.append([len(prompt) for prompt in prompts])
        return generate(prompts)

    together._generate = seen  # type: ignore[method-assign,assignment]
    assert together.answer(asked, 0) == expected
    assert sizes == [[2, 2, 3, 4], [8, 9, 12, 17], [25, 31, 40]]


def test_how_many_at_once(tmp_path: Path) -> None:
    output = tmp_path / "answers.jsonl"
    beside = tmp_path / "answers.jsonl.settings.json"
    assert [default_batch(output, device) for device in ("cpu", "cuda", "cuda:1")] == [
        BATCH_ON_CPU,
        BATCH_ON_GPU,
        BATCH_ON_GPU,
    ]
    beside.write_text(json.dumps({"batch": 7}))
    assert default_batch(output, "cuda") == BATCH_ON_GPU, "of a file that is gone"
    output.touch()
    assert default_batch(output, "cuda") == 7, "a file is gone on with as it was begun"
    for broken in ("", "[]", "{}", '{"batch": "x"}'):
        beside.write_text(broken)
        assert default_batch(output, "cpu") == BATCH_ON_CPU
