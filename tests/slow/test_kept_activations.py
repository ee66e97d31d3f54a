"""What a compiled drafter keeps for its backward: flex_attention traced with its gradient, without a C++ compiler."""

import importlib
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from drafter_trainer import flex_policy
from drafter_trainer.anchors import draw_anchors
from drafter_trainer.block_mask import build_block_attention
from drafter_trainer.drafter import DFlashDrafter
from tests.fakes.drafter_cases import packed, tiny_config, tiny_drafter

ANCHORS, BLOCK, TOKENS = 16, 8, 256


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The graphs of forward and backward as CUDA gets them, run operation by operation on the CPU."""
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    compile_for_real = torch.compile
    kept: dict[str, bool] = {}

    def traced_only(function: Callable[..., Tensor], **options: object) -> Callable[..., Tensor]:
        return compile_for_real(function, **options | {"backend": "aot_eager_decomp_partition"})  # type: ignore[call-overload]

    monkeypatch.setattr(torch, "compile", traced_only)
    # It refuses gradients on a CPU, where no compiled backward exists.
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    # Torch's defaults; whoever configured the compiler before in this process has changed them.
    for name in ("ban_recompute_materialized_backward", "ban_recompute_used_far_apart"):
        kept[name] = getattr(torch._functorch.config, name)
        setattr(torch._functorch.config, name, True)
    torch._dynamo.reset()
    yield
    for name, value in kept.items():
        setattr(torch._functorch.config, name, value)
    torch._dynamo.reset()


HEADS = -1


def kept_rows(drafter: DFlashDrafter) -> tuple[Counter[int], list[Tensor]]:
    """How many [A·B, width] tensors the forward keeps, by width, and as `HEADS` how many [1, H, A·B, d]; output and
    gradients."""
    compiled = flex_policy.compile_owned(drafter, name="drafter", graphs=1)
    config = drafter.config
    pack = packed([130, 90], TOKENS)
    anchors = draw_anchors(pack["loss_mask"], pack["document_ids"], ANCHORS, 0, 0)
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(TOKENS, 2 * config.hidden_size, generator=generator)
    rows = torch.randn(ANCHORS * BLOCK, config.hidden_size, generator=generator)
    block_positions = (anchors.positions[:, None] + torch.arange(BLOCK)).flatten()
    attention = build_block_attention(drafter.attention_layout("flex"), anchors, pack["position_ids"])
    hidden = compiled(features, rows, pack["position_ids"], block_positions, attention)
    given = {tensor.data_ptr() for tensor in (features, rows, *drafter.parameters())}
    saved = [tensor for tensor in hidden.grad_fn.saved_tensors if tensor.data_ptr() not in given]
    widths = Counter(tensor.shape[1] for tensor in saved if tensor.dim() == 2 and len(tensor) == ANCHORS * BLOCK)
    widths[HEADS] = sum(tensor.dim() == 4 and tensor.shape[2] == ANCHORS * BLOCK for tensor in saved)
    return widths, [hidden, *torch.autograd.grad(hidden.square().sum(), list(drafter.parameters()))]


def test_neither_the_gated_product_nor_a_norms_output_is_kept(traced: None) -> None:
    drafter = tiny_drafter(tiny_config(BLOCK))
    inner = drafter.config.intermediate_size
    before, reference = kept_rows(drafter)
    torch._dynamo.reset()
    flex_policy.configure_compiler()
    after, results = kept_rows(drafter)
    layers = drafter.config.num_layers
    assert before[inner] == 3 * layers and after[inner] == 2 * layers, "gate and up"
    assert before[HEADS] == 2 * layers and after[HEADS] == layers, "what attention returns; queries are rotated again"
    assert after.total() <= before.total() - 2 * layers
    torch.testing.assert_close(results, reference)


def test_a_checkpointed_layer_keeps_its_input_alone(traced: None) -> None:
    drafter = tiny_drafter(tiny_config(BLOCK))
    _, reference = kept_rows(drafter)
    torch._dynamo.reset()
    drafter.recompute_layers(drafter.config.num_layers)
    kept, results = kept_rows(drafter)
    assert kept[drafter.config.intermediate_size] == 0
    assert kept[drafter.config.hidden_size] <= drafter.config.num_layers + 1
    torch.testing.assert_close(results, reference)


def test_layers_behind_those_that_are_computed_again_keep_what_they_did(traced: None) -> None:
    drafter = tiny_drafter(tiny_config(BLOCK))
    assert drafter.config.num_layers == 2
    before, reference = kept_rows(drafter)
    torch._dynamo.reset()
    drafter.recompute_layers(1)
    kept, results = kept_rows(drafter)
    wide = drafter.config.intermediate_size
    assert kept[wide] == before[wide] / 2 > 0
    torch.testing.assert_close(results, reference)
