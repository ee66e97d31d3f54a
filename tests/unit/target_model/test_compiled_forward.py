"""Compiled decoder layers give what transformers gives, from few graphs, and never compile after the warm-up."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from slipstream.compiled_code import compiled_graphs
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import TargetSpec
from slipstream.target_loading import decoder_layers
from target_server.attention import per_document
from target_server.forward import PackedForward, WrongResultError
from target_server.forward_graphs import ForwardGraphs, cumulative_lengths
from target_server.target_model import TargetModel, choose_backend
from tests.fakes.tiny_models import Family
from tests.unit.target_model.document_alone import load_reference, load_tiny_target, save_tiny_target
from tests.unit.target_model.test_packed_forward import LENGTHS, alone, by_layer, largest_error, random_tokens

ROWS = sum(LENGTHS) + 13
# Traces as for a GPU, and runs what was traced without a code generator.
TRACED = "aot_eager"


def compiled(directory: Path, family: Family = "llama", **model: object) -> PackedForward:
    return PackedForward(load_tiny_target(save_tiny_target(directory, family, **model)).model, backend=TRACED)


@pytest.mark.parametrize(
    ("family", "kinds"),
    [("llama", 1), ("mistral", 1), ("qwen2", 1), ("qwen3", 1), ("qwen3_moe", 1), ("gemma2", 2), ("gemma3", 2)],
)
def test_equal_to_transformers_from_one_graph_for_each_kind_of_layer(
    family: Family, kinds: int, tmp_path: Path
) -> None:
    forward = compiled(tmp_path, family)
    assert forward.prepare(ROWS) == kinds
    before = compiled_graphs()
    for seed, lengths in enumerate((LENGTHS, (ROWS,), (5, 1))):
        tokens = random_tokens(ROWS, seed)
        captured = forward.capture(tokens, lengths, range(4), last_hidden_state=True)
        expected = alone(load_reference(tmp_path), tokens, lengths)
        for ours, theirs in zip(by_layer(captured, 4), expected, strict=True):
            assert ours.shape == (ROWS, 64)
            assert largest_error(ours[: sum(lengths)], theirs) < 1e-5
            assert not ours[sum(lengths) :].any()
    assert compiled_graphs() == before, "new documents are no new graph"


def test_fewer_layers_are_no_new_graph_and_no_later_layer_runs(tmp_path: Path) -> None:
    loaded = load_tiny_target(save_tiny_target(tmp_path))
    forward, ran = PackedForward(loaded.model, backend=TRACED), []
    forward.prepare(ROWS)
    for index, layer in enumerate(decoder_layers(loaded.model)):
        layer.register_forward_pre_hook(lambda *_arguments, index=index: ran.append(index))
    before = compiled_graphs()
    captured = forward.capture(random_tokens(ROWS), LENGTHS, (1,), last_hidden_state=False)
    assert (set(captured), ran, compiled_graphs()) == ({"hidden_states.1"}, [0, 1], before)
    assert not any("forward" in vars(layer) for layer in decoder_layers(loaded.model))


def test_a_length_is_prepared_once_and_an_unknown_one_is_named(tmp_path: Path) -> None:
    forward = compiled(tmp_path)
    assert (forward.prepare(ROWS), forward.prepare(ROWS), forward.prepare(128)) == (1, 0, 1)
    with pytest.raises(SlipstreamError, match=rf"packs of \[{ROWS}, 128\] tokens, and this one has 64") as caught:
        forward.capture(random_tokens(64), (64,), (0,), last_hidden_state=False)
    assert caught.value.reason is Reason.PACK_OUTSIDE_BUCKETS


def test_what_would_compile_after_the_warm_up_is_an_error(tmp_path: Path) -> None:
    loaded = load_tiny_target(save_tiny_target(tmp_path))
    forward = PackedForward(loaded.model, backend=TRACED)
    forward.prepare(ROWS)
    decoder_layers(loaded.model)[2].to(torch.float64)
    with pytest.raises(
        SlipstreamError, match="compiled again after the warm-up.*slipstream_LlamaDecoderLayer"
    ) as found:
        forward.capture(random_tokens(ROWS), LENGTHS, range(4), last_hidden_state=False)
    assert found.value.reason is Reason.PACK_OUTSIDE_BUCKETS


def test_layers_that_cannot_be_traced_whole_run_as_they_are_once_told(tmp_path: Path) -> None:
    loaded = load_tiny_target(save_tiny_target(tmp_path))
    for layer in decoder_layers(loaded.model):
        layer.mlp = AskingTheHost(layer.mlp)
    forward = PackedForward(loaded.model, backend=TRACED)
    with pytest.raises(RuntimeError):
        forward.prepare(ROWS)
    forward.stop_compiling()
    tokens = random_tokens(ROWS)
    captured = forward.capture(tokens, LENGTHS, range(4), last_hidden_state=False)
    for ours, theirs in zip(by_layer(captured, 4), alone(load_reference(tmp_path), tokens, LENGTHS), strict=True):
        assert largest_error(ours[: sum(LENGTHS)], theirs) < 1e-5


class AskingTheHost(nn.Module):
    """An MLP whose path depends on a value."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, row: Tensor) -> Tensor:
        return self.inner(row) if row.sum().item() < 1e9 else row


def test_layers_that_something_else_has_wrapped(tmp_path: Path) -> None:
    loaded = load_tiny_target(save_tiny_target(tmp_path))
    layer = decoder_layers(loaded.model)[0]
    layer.forward = layer.forward
    with pytest.raises(RuntimeError, match="replaced the forward of a LlamaDecoderLayer"):
        PackedForward(loaded.model, backend=TRACED).prepare(ROWS)


def test_compiled_code_that_computes_something_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, outputs = PackedForward._run, []

    def first_answer_is_wrong(*arguments: object) -> dict[int, Tensor]:
        outputs.append(original(*arguments))  # type: ignore[arg-type]
        return {layer: output + (len(outputs) == 1) for layer, output in outputs[-1].items()}

    monkeypatch.setattr(PackedForward, "_run", first_answer_is_wrong)
    with pytest.raises(WrongResultError, match="layer 0 of the target computes something else"):
        compiled(tmp_path).prepare(ROWS)


def test_tokens_after_the_last_document_are_not_read(tmp_path: Path) -> None:
    forward = compiled(tmp_path)
    forward.prepare(20)
    tokens = random_tokens(20)
    tokens[12:] = -1
    first = forward.capture(tokens, (5, 7), (3,), last_hidden_state=False)["hidden_states.3"]
    assert np.isfinite(first.numpy()).all()


def spec(directory: Path, **fields: object) -> TargetSpec:
    return TargetSpec(model=str(directory), dtype="float32", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "device", "environment", "words"),
    [
        ({}, "cpu", {}, "no: target.compile is auto, and on cpu"),
        ({"compile": False}, "cuda", {}, "no: target.compile is false"),
        ({"compile": True}, "cpu", {}, "yes: target.compile is true"),
        ({}, "cuda", {}, "yes: target.compile is auto, and the device is a GPU"),
        ({}, "cuda", {"TORCH_COMPILE_DISABLE": "1"}, "no: target.compile is auto, and TORCH_COMPILE_DISABLE=1 is set"),
    ],
)
def test_what_is_compiled_is_said_with_its_reason(
    fields: dict[str, object], device: str, environment: dict[str, str], words: str
) -> None:
    backend, said = choose_backend(spec(Path("m"), **fields), torch.device(device), environment)
    assert said.startswith(words)
    assert backend == ("inductor" if said.startswith("yes") else None)


def test_an_environment_that_forbids_what_the_recipe_asks_for() -> None:
    with pytest.raises(SlipstreamError, match=r"compile is true, but TORCHDYNAMO_DISABLE=1 is set") as caught:
        choose_backend(spec(Path("m"), compile=True), torch.device("cuda"), {"TORCHDYNAMO_DISABLE": "1"})
    assert caught.value.reason is Reason.ENVIRONMENT_UNSUPPORTED


@pytest.mark.parametrize("asked", [True, "auto"])
def test_a_target_that_cannot_be_compiled(
    asked: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("target_server.target_model.choose_backend", lambda *_arguments: (TRACED, "yes: a test"))
    target = TargetModel.load(spec(save_tiny_target(tmp_path), compile=asked), device="cpu")
    assert not target.is_prepared(64)

    def fail(*_arguments: object) -> int:
        raise RuntimeError("no C compiler\nmore")

    monkeypatch.setattr(PackedForward, "prepare", fail)
    if asked is True:
        with pytest.raises(SlipstreamError, match="cannot be compiled: RuntimeError: no C compiler") as caught:
            target.prepare(64)
        assert caught.value.reason is Reason.ENVIRONMENT_UNSUPPORTED
        return
    with caplog.at_level("WARNING"):
        target.prepare(64)
    assert "target_not_compiled" in caplog.text
    assert target.is_prepared(64)
    assert target.capture(random_tokens(64), (60,), (0,), False)["hidden_states.0"].shape == (64, 64)


class CountingItsCalls(nn.Module):
    """An MLP that is another one each time: compiled code fits one call only."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, row: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(row) if self.calls > 0 else row


kernel_is_there = True


@torch.library.custom_op("slipstream_tests::loaded_late", mutates_args=())
def loaded_late(row: Tensor) -> Tensor:
    """What some quantised layers do: a kernel that is looked for when it runs."""
    if not kernel_is_there:
        raise ImportError("no kernel for this GPU")
    return row.clone()


@loaded_late.register_fake
def _(row: Tensor) -> Tensor:
    global kernel_is_there
    kernel_is_there = False  # the layers as they are have run by now
    return torch.empty_like(row)


class LoadingAKernel(nn.Module):
    """An MLP that computes as it is, and fails when compiled code runs it, with no RuntimeError."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, row: Tensor) -> Tensor:
        return self.inner(loaded_late(row))


@pytest.mark.parametrize("asked", [True, "auto"])
@pytest.mark.parametrize(
    ("part", "words"),
    [
        (AskingTheHost, "Error: "),  # torch words it otherwise from release to release
        (CountingItsCalls, "would have been compiled again"),
        (LoadingAKernel, "ImportError: no kernel"),
    ],
)
def test_a_layer_that_cannot_be_compiled_is_served_as_it_is_or_refused(
    part: type[nn.Module], words: str, asked: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    global kernel_is_there
    monkeypatch.setattr("target_server.target_model.choose_backend", lambda *_arguments: (TRACED, "yes: a test"))
    loaded = load_tiny_target(save_tiny_target(tmp_path))
    for layer in decoder_layers(loaded.model):
        layer.mlp = part(layer.mlp)
    kernel_is_there = True
    target = TargetModel(loaded, spec(tmp_path, compile=asked), "f")
    if asked is True:
        with pytest.raises(SlipstreamError, match=f"cannot be compiled: .*{words}") as caught:
            target.prepare(ROWS)
        assert caught.value.reason is Reason.ENVIRONMENT_UNSUPPORTED
        return
    target.prepare(ROWS)
    (record,) = [record for record in caplog.records if record.message == "target_not_compiled"]
    assert words in str(record.__dict__)
    kernel_is_there = True
    tokens = random_tokens(ROWS)
    captured = target.capture(tokens, LENGTHS, range(4), False)
    for ours, theirs in zip(by_layer(captured, 4), alone(load_reference(tmp_path), tokens, LENGTHS), strict=True):
        assert largest_error(ours[: sum(LENGTHS)], theirs) < 1e-5


@pytest.mark.parametrize("asked", [True, "auto"])
def test_a_layer_that_changes_after_the_warm_up(
    asked: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The pack is computed all the same, and those after it, by the layers as they are."""
    monkeypatch.setattr("target_server.target_model.choose_backend", lambda *_arguments: (TRACED, "yes: a test"))
    loaded = load_tiny_target(save_tiny_target(tmp_path))
    target = TargetModel(loaded, spec(tmp_path, compile=asked), "f")
    target.prepare(ROWS)
    decoder_layers(loaded.model)[2].self_attn.scaling *= 1.5
    if asked is True:
        with pytest.raises(SlipstreamError, match="cannot be compiled: .*compiled again after the warm-up") as caught:
            target.capture(random_tokens(ROWS), LENGTHS, range(4), False)
        assert caught.value.reason is Reason.ENVIRONMENT_UNSUPPORTED
        return
    for seed in range(2):
        captured = target.capture(random_tokens(ROWS, seed), LENGTHS, range(4), False)
        assert captured["hidden_states.3"].shape == (ROWS, 64) and not target._forward.is_compiled
    assert caplog.text.count("target_not_compiled") == 1
    with pytest.raises(SlipstreamError, match="has layers 0 to 3"):
        target.capture(random_tokens(ROWS), LENGTHS, (4,), False)


def test_what_a_recorded_forward_is_told_of_documents() -> None:
    assert cumulative_lengths((5, 1, 7), 4).tolist() == [0, 5, 6, 13, 13], "a missing document is empty"
    assert cumulative_lengths((3, 2), 2).tolist() == [0, 3, 5]


def test_a_pack_takes_a_larger_recording_once_there_are_many() -> None:
    graphs = ForwardGraphs(8192, torch.device("cpu"), per_document, lambda *_arguments: {})
    assert graphs._key((300,) * 23, (1, 8)) == (24, 512, (1, 8))
    assert graphs._key((1077, 5), (1, 8)) == (16, 1280, (1, 8))
    graphs._recordings = dict.fromkeys([(8 * n, 2048, (1,)) for n in range(2, 18)])  # type: ignore[assignment]
    assert graphs._key((300,) * 33, (1,)) == (40, 2048, (1,))
    assert graphs._key((300,) * 33, (2,)) is None
    assert graphs._key((3000, 1), (1,)) is None
