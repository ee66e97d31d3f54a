"""How many steps a run has, for its plan and for its trainer."""

from typing import Any

import pytest

from slipstream.errors import SlipstreamError
from slipstream.run_length import total_steps
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import RunSpec


def spec(**train: Any) -> RunSpec:
    data = {"files": ("/a/conversations.jsonl",), "pack_tokens": 128}
    return RunSpec.model_validate({"name": "tiny", "target": {"model": "/a/model"}, "data": data, "train": train})


@pytest.mark.parametrize(
    ("train", "packs", "expected"),
    [
        ({"max_steps": 10}, None, 10),
        ({"max_tokens": 1000}, None, 7),  # 7 x 128 <= 1000
        ({"max_tokens": 1000, "packs_per_step": 2}, None, 3),
        ({"max_steps": 100, "epochs": 1}, 20, 20),
        ({"max_steps": 100, "epochs": 1, "packs_per_step": 3}, 20, 6),
        ({"max_steps": 4, "epochs": 1}, 20, 4),
        ({"epochs": 1}, None, None),
    ],
)
def test_the_run_ends_at_what_comes_first(train: dict[str, Any], packs: int | None, expected: int | None) -> None:
    assert total_steps(spec(**train), packs) == expected


def test_data_of_less_than_a_step_is_refused() -> None:
    with pytest.raises(SlipstreamError, match=r"does not fill one step: 1 pack, a step takes 2\.") as refused:
        total_steps(spec(epochs=1, packs_per_step=2), 1)
    assert refused.value.reason is Reason.DATA_INVALID and "packs_per_step" in refused.value.remedy
