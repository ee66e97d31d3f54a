"""Plans of targets that describe themselves oddly, and of flags that nobody means: words, never a traceback."""

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli.commands.plan import parse_tflops
from slipstream.errors import SlipstreamError
from slipstream.gguf_header import read_gguf_header
from slipstream.plan import search
from slipstream.plan.memory import GIB
from slipstream.plan.search import _knobs, nearest_fit
from slipstream.plan.sizes import RunSizes, TargetSizes
from slipstream.plan.target_sizes import sizes_of_config, sizes_of_numbers, target_sizes
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import RunSpec, TargetSpec
from slipstream.run_spec.target_layers import default_target_layer_ids
from tests.unit.plan.sizes import A

CONFIG = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 512,
}


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 5, 9, 30])
def test_layers_are_those_that_the_trainer_finds(num_layers: int) -> None:
    target = sizes_of_config(CONFIG | {"num_hidden_layers": num_layers}, "here")
    for num_features in range(1, 30):
        drafter: dict[str, object] = {"num_features": num_features}
        assert _is_refused(drafter, target) is _raises(default_target_layer_ids, num_layers, num_features)
    assert not _is_refused({"target_layer_ids": [num_layers - 1]}, target)
    assert _is_refused({"target_layer_ids": [num_layers]}, target)


def _is_refused(drafter: dict[str, object], target: TargetSizes) -> bool:
    run = {"name": "r", "target": {"model": "m"}, "data": {"files": ["f"]}, "train": {"max_steps": 1}}
    return _raises(RunSizes.of, RunSpec.model_validate(run | {"drafter": drafter}), target)


def _raises(function: Callable[..., object], *arguments: object) -> bool:
    try:
        function(*arguments)
    except SlipstreamError as error:
        assert error.reason is Reason.TARGET_INCOMPATIBLE
        return True
    return False


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_attention_heads": 0},
        {"hidden_size": -64},
        {"num_hidden_layers": True},
        {"head_dim": "64"},
        {"head_dim": -1},
        {"num_key_value_heads": [1, 2]},
        {"vocab_size": 1.5},
        {"hidden_size": 10**30},
    ],
)
def test_a_configuration_whose_values_are_no_sizes(wrong: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG | wrong))
    with pytest.raises(SlipstreamError) as refused:
        target_sizes(TargetSpec(model="nobody/nothing"), str(path))
    assert next(iter(wrong)) in refused.value.message and "--target-config" in refused.value.remedy


def test_what_is_null_has_the_default() -> None:
    sizes = sizes_of_config(CONFIG | {"head_dim": None, "num_key_value_heads": None}, "here")
    assert (sizes.head_dim, sizes.num_key_value_heads) == (16, 4)


def test_more_heads_than_numbers() -> None:
    with pytest.raises(SlipstreamError, match="no head"):
        sizes_of_config(CONFIG | {"num_attention_heads": 128}, "here")


@pytest.mark.parametrize("given", ["~nobody-of-this-name/model", "a" * 5000, "a\0b", "", "/dev/null"])
def test_what_is_no_path(given: str) -> None:
    with pytest.raises(SlipstreamError, match="does not exist as a file"):
        target_sizes(TargetSpec(model="nobody/nothing"), given)


@pytest.mark.parametrize("value", ["9" * 5000, "9" * 30, "0"])
def test_a_number_that_no_target_has(value: str) -> None:
    with pytest.raises(SlipstreamError, match="no positive number"):
        sizes_of_numbers(f"hidden_size={value}")


def test_json_that_is_too_deep(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(SlipstreamError, match="is not JSON"):
        target_sizes(TargetSpec(model="nobody/nothing"), str(tmp_path))


def text_of(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def test_what_a_gguf_says_layer_by_layer_is_not_taken_for_a_number(tmp_path: Path) -> None:
    """The length of the list would be: a target whose layers have different numbers of heads."""
    numbers = {"block_count": 2, "embedding_length": 64, "attention.head_count": 4, "vocab_size": 512}
    pairs = [text_of("general.architecture") + struct.pack("<I", 8) + text_of("some")]
    pairs += [text_of(f"some.{key}") + struct.pack("<II", 4, value) for key, value in numbers.items()]
    pairs += [text_of("some.feed_forward_length") + struct.pack("<IIQ", 9, 4, 2) + struct.pack("<II", 128, 256)]
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs)) + b"".join(pairs))
    with pytest.raises(SlipstreamError, match="intermediate_size = a list of 2"):
        target_sizes(TargetSpec(model=str(path)))


def test_a_gguf_array_that_no_file_can_hold(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    pair = text_of("some.list") + struct.pack("<IIQ", 9, 10, 1 << 63)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pair)
    with pytest.raises(SlipstreamError, match="cannot be read as a GGUF file"):
        read_gguf_header(path)


def test_a_speed_that_nothing_has() -> None:
    for text in ("1e-320", "1e308"):
        with pytest.raises(Exception, match="is no number from"):
            parse_tflops(text)


def test_the_search_ends_however_much_there_is_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    deep = replace(A, num_layers=1_000_000, packs_per_step=1024, moving_average=True)
    assert max(len(list(knob)) for knob in _knobs(deep, 24 * GIB)) < 32
    tried = 0
    peak = search._peak

    def counted(*given: Any) -> int:
        nonlocal tried
        tried += 1
        return peak(*given)

    monkeypatch.setattr(search, "_peak", counted)
    many = replace(A, num_layers=32, packs_per_step=1024, moving_average=True)
    fit = nearest_fit(many, 12 * GIB, 12 * GIB)
    assert fit is not None and fit.peak_bytes <= 12 * GIB
    assert tried < 60_000
