"""Compiled or not at all: environment checks, the tripwire, own compiled functions, the freeze.

No kernel is generated here: graphs run on Dynamo's eager backends, and AOTAutograd shows what a real one would get.
Generated kernels run in tests/system/test_compiled_attention.py (CPU) and tests/gpu.
"""

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._higher_order_ops.flex_attention import flex_attention as flex_forward_op
from torch._higher_order_ops.flex_attention import flex_attention_backward as flex_backward_op
from torch.nn.attention.flex_attention import flex_attention

from drafter_trainer import flex_policy
from drafter_trainer.acceptance import StepSums
from drafter_trainer.anchors import Anchors, BlockTargets, build_block_targets, draw_anchors
from drafter_trainer.block_mask import AttentionLayout, BlockAttention, build_block_attention
from drafter_trainer.drafter import DFlashDrafter
from drafter_trainer.loss import drafter_loss, loss_of_chunk, resolve_loss_config
from drafter_trainer.warmup import require_same_graphs
from slipstream.compile_guards import guards_of, torch_release
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import LossSpec
from tests.fakes.drafter_cases import MASK_TOKEN, VOCAB, packed, tiny_config, tiny_drafter

CPU = torch.device("cpu")


@pytest.fixture
def tripwire() -> Iterator[None]:
    """The dense kernels replaced for one test only: other tests share this process."""
    kept = [(operator, dict(operator.py_kernels)) for operator in (flex_forward_op, flex_backward_op)]
    flex_policy.install_tripwire()
    yield
    for operator, kernels in kept:
        operator.py_kernels.update(kernels)
        operator._dispatch_cache.clear()


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[object], None]]:
    """Choose what runs the graphs of this test; they are traced and guarded as ever."""
    original = torch.compile
    torch._dynamo.reset()
    yield lambda chosen: monkeypatch.setattr(torch, "compile", functools.partial(original, backend=chosen))
    torch._dynamo.reset()


@dataclasses.dataclass(frozen=True)
class Step:
    """Arguments of one drafter call."""

    features: Tensor
    block_embeddings: Tensor
    context_positions: Tensor
    block_positions: Tensor
    attention: BlockAttention

    def through(self, drafter: object) -> Tensor:
        return drafter(*(getattr(self, f.name) for f in dataclasses.fields(self)))  # type: ignore[operator]


def step(drafter: DFlashDrafter, kind: str, seed: int) -> Step:
    """A pack of its own: documents, gaps, anchors (the last ones invalid)."""
    pack = packed([10, 60, 30 + seed], 128, seed=seed)
    drawn = draw_anchors(pack["loss_mask"], pack["document_ids"], 6, seed, 0)
    anchors = Anchors(drawn.positions, drawn.valid & (torch.arange(6) < 5))
    targets = build_block_targets(pack, anchors, block_size=drafter.config.block_size, mask_token_id=MASK_TOKEN)
    generator = torch.Generator().manual_seed(seed)
    embed = torch.randn(VOCAB, drafter.config.hidden_size, generator=generator)
    features = torch.randn(128, 2 * drafter.config.hidden_size, generator=generator)
    attention = build_block_attention(drafter.attention_layout(kind), anchors, pack["position_ids"])
    return Step(
        features,
        embed[targets.block_ids.flatten()],
        pack["position_ids"],
        targets.block_positions.flatten(),
        attention,
    )


def test_the_environment_of_the_tests_is_accepted() -> None:
    guards = flex_policy.check_environment(CPU)
    words = guards.in_words()
    assert words.startswith(f"torch {torch.__version__}: ")
    release = torch_release(torch.__version__)
    assert release is not None
    assert all(f"{what}: {then}" in words for what, then in guards_of(release).items())


@pytest.mark.parametrize("variable", ["TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_SUPPRESS_ERRORS"])
def test_variables_that_allow_dense_attention_are_refused(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(SlipstreamError, match=f"{variable}=1 is set") as caught:
        flex_policy.check_environment(CPU)
    assert caught.value.reason is Reason.ENVIRONMENT_UNSUPPORTED


@pytest.mark.parametrize(
    ("name", "value"), [("suppress_errors", True), ("disable", True), ("error_on_nested_fx_trace", False)]
)
def test_configuration_that_allows_dense_attention_is_refused(name: str, value: bool) -> None:
    with (
        torch._dynamo.config.patch({name: value}),
        pytest.raises(SlipstreamError, match=f"{name} is {value}"),
    ):
        flex_policy.check_environment(CPU)


def test_an_old_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.1")
    with pytest.raises(SlipstreamError, match=r"torch is 2\.10\.1"):
        flex_policy.check_environment(CPU)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_an_uncompiled_call_raises_with_its_shapes(tripwire: None) -> None:
    query, key = (torch.randn(1, 2, n, 16) for n in (128, 256))
    with pytest.raises(SlipstreamError, match=r"query \(1, 2, 128, 16\), key \(1, 2, 256, 16\)") as caught:
        flex_attention(query, key, key)
    assert caught.value.reason is Reason.DENSE_ATTENTION


def test_a_dense_backward_raises_too(tripwire: None) -> None:
    tensors = [torch.randn(1, 2, 128, 16) for _ in range(7)]
    with pytest.raises(SlipstreamError, match="backward") as caught:
        flex_backward_op(*tensors[:6], None, None, None, (), 1.0, {})
    assert caught.value.reason is Reason.DENSE_ATTENTION


def test_a_compiled_call_that_goes_dense_raises(tripwire: None, backend: Callable[[object], None]) -> None:
    """A backend that runs the operator as it is stands for every way in which a compiled call goes dense."""
    backend("eager")
    layout = AttentionLayout("flex", block_size=16)
    anchors = Anchors(torch.tensor([5, 90]), torch.tensor([True, True]))
    attention = build_block_attention(layout, anchors, torch.arange(128))
    compiled = flex_policy.compile_owned(functools.partial(attention, sliding=False), name="attention", graphs=1)
    with pytest.raises(SlipstreamError, match="ran uncompiled"):
        compiled(torch.randn(2, 32, 16), torch.randn(2, 160, 16), torch.randn(2, 160, 16))


def test_the_drafter_is_one_graph_for_all_packs_and_equals_sdpa(backend: Callable[[object], None]) -> None:
    """The flex masks, evaluated through the operator's own mask path, agree with SDPA."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    backend(aot_autograd(fw_compiler=keep))
    drafter = tiny_drafter(tiny_config(7, window=20))
    rows = torch.arange(6 * 7) < 5 * 7
    compiled = flex_policy.compile_owned(drafter, name="drafter", graphs=1)
    with torch.no_grad():
        for seed in range(3):
            ours = step(drafter, "flex", seed).through(compiled)
            expected = step(drafter, "sdpa", seed).through(drafter)
            torch.testing.assert_close(ours[rows], expected[rows], rtol=1e-4, atol=1e-5)
            assert torch.isfinite(ours).all()
    assert len(graphs) == 1
    operators = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert operators.count(flex_forward_op) == drafter.config.num_layers


@pytest.mark.parametrize("scheme", ["decay", "dpace"])
def test_the_loss_of_all_chunks_is_one_graph(backend: Callable[[object], None], scheme: str) -> None:
    backend("aot_eager")
    spec = LossSpec(slot_weights=scheme, chunk_rows=14)
    config = resolve_loss_config(spec, block_size=8, vocab_size=VOCAB, logit_soft_cap=20.0, device=CPU)
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, VOCAB, (5, 8), generator=generator)
    counted = torch.arange(8) < torch.tensor([[8], [5], [1], [0], [8]])
    targets = BlockTargets(labels, labels, labels, counted & (torch.arange(8) > 0))
    hidden, head = torch.randn(40, 12, generator=generator), torch.randn(VOCAB, 12, generator=generator)
    before = flex_policy.compiled_graphs()
    compiled = flex_policy.compile_owned(loss_of_chunk, name="loss", graphs=1)
    assert flex_policy.graphs_declared()["loss"] == 1
    results = []
    for chunk_loss in (compiled, None):
        rows = hidden.clone().requires_grad_()
        sums = drafter_loss(rows, head, targets, config, chunk_loss)
        sums.numerator.backward()
        results.append((rows.grad, StepSums.of(sums).values))
    torch.testing.assert_close(results[0], results[1])
    assert flex_policy.compiled_graphs() - before == 1


def test_owned_functions_do_not_share_a_limit(backend: Callable[[object], None]) -> None:
    backend("eager")
    flex_policy.configure_compiler()

    def doubled(values: Tensor) -> Tensor:
        return values * 2

    for copy in range(12):
        owned = flex_policy.compile_owned(doubled, name=f"copy_{copy}", graphs=1)
        assert owned(torch.ones(3 + copy)).sum() == 2 * (3 + copy)


def test_an_owned_function_belongs_to_the_thread_that_compiled_it(backend: Callable[[object], None]) -> None:
    backend("eager")
    owned = flex_policy.compile_owned(torch.neg, name="negative", graphs=1)
    raised: list[BaseException] = []

    def call() -> None:
        try:
            owned(torch.ones(2))
        except AssertionError as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(timeout=30)
    assert "another thread" in str(raised[0])


@pytest.fixture
def undo_freeze() -> Iterator[None]:
    """A trainer never compiles again; the other tests of this process do."""
    yield
    torch._dynamo.callback.callback_handler.clear()
    torch.compiler.set_stance("default")


def test_after_the_freeze_nothing_compiles(backend: Callable[[object], None], undo_freeze: None) -> None:
    backend("eager")
    known = flex_policy.compile_owned(torch.neg, name="known", graphs=2)
    unknown = flex_policy.compile_owned(torch.abs, name="unknown", graphs=2)
    known(torch.ones(3))
    graphs = flex_policy.compiled_graphs()
    require_same_graphs(graphs)
    known(torch.ones(5))
    with pytest.raises(SlipstreamError, match="compiled 1 more graphs when they came a second time"):
        require_same_graphs(graphs)
    assert flex_policy.CompilationFreeze((128, 256)).freeze() >= 1
    assert known(torch.ones(3)).tolist() == [-1.0] * 3
    with pytest.raises(RuntimeError, match="fail_on_recompile"):
        known(torch.ones(4))
    with pytest.raises((SlipstreamError, RuntimeError), match=r"after the warm-up|fail_on_recompile"):
        unknown(torch.ones(3))


def test_a_backward_that_is_compiled_late_is_refused_with_the_buckets(
    backend: Callable[[object], None], undo_freeze: None
) -> None:
    """What a warm-up of forwards alone would leave behind: the stance does not see it, the callback does."""
    backend("inductor")
    with torch._functorch.config.patch(force_non_lazy_backward_lowering=False):
        owned = flex_policy.compile_owned(lambda values: (values * 2).sin(), name="late", graphs=1)
        output = owned(torch.ones(3, requires_grad=True))
        flex_policy.CompilationFreeze((128, 256)).freeze()
        with pytest.raises(SlipstreamError, match="for packs of 128, 256 tokens") as refused:
            output.sum().backward()
    assert refused.value.reason is Reason.PACK_OUTSIDE_BUCKETS


def test_a_setting_that_a_newer_torch_has_dropped_is_said_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Config:
        force_non_lazy_backward_lowering = False
        ban_recompute_used_far_apart = True

    monkeypatch.setattr(torch._functorch, "config", Config)
    flex_policy.configure_compiler()
    assert Config.force_non_lazy_backward_lowering and not Config.ban_recompute_used_far_apart
    (warning,) = caplog.records
    assert warning.message == "compiler_setting_unknown"
    assert warning.slipstream_fields["settings"] == ["ban_recompute_materialized_backward"]  # type: ignore[attr-defined]


def test_a_failure_is_described_with_shapes_and_versions() -> None:
    report = flex_policy.describe_failure(RuntimeError("guard failed"), {"input_ids": (2048,)})
    assert report["error"] == "RuntimeError: guard failed"
    assert report["shapes"] == "input_ids (2048,)"
    assert report["torch"] == str(torch.__version__)
    assert report["host_memory"].endswith(" of them available")


def test_a_head_size_that_the_card_cannot_take_is_refused_in_the_doctors_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = SimpleNamespace(name="NVIDIA GeForce RTX 5090", major=12, minor=0, shared_memory_per_block_optin=101_376)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    flex_policy.check_head_dim(torch.device("cuda"), 128)
    with pytest.raises(SlipstreamError, match="RTX 5090 cannot train this drafter: head_dim 256 is larger") as refused:
        flex_policy.check_head_dim(torch.device("cuda"), 256)
    assert refused.value.reason is Reason.ENVIRONMENT_UNSUPPORTED and "slipstream doctor" in refused.value.remedy
