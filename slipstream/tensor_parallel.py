"""A model larger than one device: transformers' tensor parallelism, one process for each rank.

Every rank has a part of each layer's matrices and all of the embedding, head and norms: facts and frozen weights are
read from one rank as from a whole model, and the price is the embedding and head once more on every further device.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.errors import SlipstreamError
from slipstream.quantised_target import find_quantisation
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import TargetSpec
from slipstream.target_files import TargetFiles, model_error

if TYPE_CHECKING:
    import torch

# Of these modules a rank keeps everything. Their names end so in every family.
_KEPT_WHOLE = ("embed_tokens", "lm_head")
# Sizes of a configuration that are cut into as many parts as there are ranks.
_DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size")


@dataclass(frozen=True)
class Rank:
    """The place of a process among those that compute one model."""

    index: int = 0
    count: int = 1
    rendezvous: str = ""
    """A file that no earlier group has used, seen by all of them."""


def check_divisible(spec: TargetSpec, files: TargetFiles, ranks: int) -> None:
    """Refuse what transformers cannot spread over so many ranks; reads the configuration only.

    Raises:
        SlipstreamError: SPEC_INVALID (target.compile), MODEL_INVALID.
    """
    from transformers import AutoConfig

    if spec.compile is True:
        raise SlipstreamError(
            "target.compile is true, but layers that are spread over several devices are not compiled.",
            reason=Reason.SPEC_INVALID,
            remedy="Set target.compile = 'auto' or false, or serve without --tensor-parallel.",
        )
    if files.is_gguf:
        raise model_error(
            f"{files.weights[0].name} is a GGUF file, which transformers does not spread over several devices.",
            "Name the model's directory of safetensors, or serve without --tensor-parallel.",
        )
    quantisation = find_quantisation(spec, files)
    if quantisation is not None:
        # Scales would have to be cut as the weights are, which a plan of matrices does not say.
        raise model_error(
            f"The weights of {spec.model!r} are quantised (quant_method {quantisation.method!r}), which is not spread "
            "over several devices.",
            "Name the model's unquantised files, or serve without --tensor-parallel.",
        )
    config: Any = AutoConfig.from_pretrained(
        files.root, trust_remote_code=spec.trust_remote_code, local_files_only=True
    ).get_text_config()
    if not config.base_model_tp_plan:
        raise model_error(
            f"transformers has no plan for spreading {config.model_type} over several devices.",
            "Serve it without --tensor-parallel, on devices that each hold all of it.",
        )
    for name in _DIVIDED:
        size = getattr(config, name, None)
        if isinstance(size, int) and size % ranks:
            raise model_error(
                f"{name} of {spec.model!r} is {size}, which {ranks} devices cannot share evenly.",
                f"Choose a --tensor-parallel that divides {size}.",
            )


def join_group(rank: Rank, device: str) -> None:
    """Meet the other ranks: NCCL between GPUs, gloo between CPUs. This process sees one GPU at most.

    Raises:
        RuntimeError: they did not come.
    """
    import torch
    import torch.distributed as dist

    # transformers reads these, also when the group is there already.
    os.environ.update(RANK=str(rank.index), WORLD_SIZE=str(rank.count), LOCAL_RANK="0")
    on_gpu = torch.device(device).type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{rank.rendezvous}",
        rank=rank.index,
        world_size=rank.count,
        device_id=torch.device("cuda", 0) if on_gpu else None,
    )


def sharding_arguments(root: Path, rank: Rank, source: dict[str, Any]) -> dict[str, Any]:
    """Arguments of from_pretrained with which a rank reads its part only; the group has met.

    Args:
        root: the model's directory.
        rank: of this process.
        source: arguments for reading the configuration.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.distributed import DistributedConfig
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    config = AutoConfig.from_pretrained(root, **source)
    with torch.device("meta"):
        predefined = AutoModelForCausalLM.from_config(config, trust_remote_code=source["trust_remote_code"]).tp_plan
    whole = {name for name in predefined if name.rpartition(".")[2] in _KEPT_WHOLE}
    plan = {name: style for name, style in predefined.items() if name not in whole}
    if "replicate" in ALL_PARALLEL_STYLES:
        # Newer transformers add a plan to their own instead of taking it in its place.
        plan |= dict.fromkeys(whole, "replicate")
    return {"distributed_config": DistributedConfig(tp_size=rank.count, tp_plan=plan)}


@contextmanager
def spread_over(device: "torch.device") -> Iterator[None]:
    """Within the block from_pretrained spreads a model over devices of this kind: it would take GPUs wherever torch was
    built for them, also in a process that is to use none."""
    import torch

    found = torch._C._get_accelerator
    if device.type != "cpu" or found().type == "cpu":
        yield
        return
    torch._C._get_accelerator = lambda *_: torch.device("cpu")
    try:
        yield
    finally:
        torch._C._get_accelerator = found
