"""How a model is spread over ranks, with the transformers that is installed and with one that takes plans otherwise."""

from pathlib import Path

import pytest
import torch
from transformers.distributed import tensor_parallel as theirs

from slipstream.tensor_parallel import Rank, sharding_arguments, spread_over
from tests.unit.target_model.document_alone import save_tiny_target

SOURCE = {"trust_remote_code": False, "local_files_only": True}
WHOLE = {"lm_head", "model.embed_tokens"}


def plan(directory: Path) -> dict[str, str]:
    config = sharding_arguments(directory, Rank(0, 2), SOURCE)["distributed_config"]
    assert config.tp_size == 2
    found: dict[str, str] = config.tp_plan
    return found


def test_embedding_and_head_stay_whole_and_layers_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan is added to transformers' own, or (5.17) stands in its place, and then there is no style for `whole`."""
    model = save_tiny_target(tmp_path, "qwen3")
    styles = dict(theirs.ALL_PARALLEL_STYLES.items())
    for has_style in (True, False):
        known = dict(styles, replicate=None) if has_style else {n: s for n, s in styles.items() if n != "replicate"}
        monkeypatch.setattr(theirs, "ALL_PARALLEL_STYLES", known)
        found = plan(model)
        assert found["model.layers.*.self_attn.q_proj"] == "colwise"
        assert found["model.layers.*.mlp.down_proj"] == "rowwise"
        whole = {name: style for name, style in found.items() if name in WHOLE}
        assert whole.keys() <= WHOLE and set(whole.values()) == ({"replicate"} if has_style else set()), found


def test_processes_without_a_gpu_spread_over_cpus_where_torch_knows_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    built_for = lambda *_: torch.device("cuda")  # noqa: E731 - as torch built with CUDA says
    monkeypatch.setattr(torch._C, "_get_accelerator", built_for)
    with spread_over(torch.device("cpu")):
        assert torch._C._get_accelerator().type == "cpu"
    with spread_over(torch.device("cuda")):
        assert torch._C._get_accelerator is built_for
    assert torch._C._get_accelerator is built_for
