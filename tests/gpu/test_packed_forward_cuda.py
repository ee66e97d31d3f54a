"""Packed prefill on CUDA: the variable-length kernel where it fits, per-document attention elsewhere; both exact."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from target_server.attention import FLASH_2, AttentionTraits, PackedDocuments, choose_kernel, per_document
from target_server.flash_attention_4 import FLASH_4
from target_server.forward import PackedForward
from target_server.forward_graphs import ForwardGraphs
from tests.fakes.tiny_models import Family
from tests.unit.target_model.document_alone import load_reference, load_tiny_target, save_tiny_target
from tests.unit.target_model.test_packed_forward import LENGTHS, alone, by_layer, largest_error, random_tokens

LONG_LENGTHS = (1, 700, 1, 300, 22)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma3"])
@pytest.mark.parametrize("lengths", [LENGTHS, LONG_LENGTHS], ids=["short", "long"])
def test_variable_length_attention(family: Family, lengths: tuple[int, ...], tmp_path: Path) -> None:
    save_tiny_target(tmp_path, family)
    forward = PackedForward(load_tiny_target(tmp_path, "bfloat16", "cuda").model)
    assert forward.attention == FLASH_2
    tokens = random_tokens(sum(lengths) + 13)

    captured = forward.capture(tokens, lengths, range(4), last_hidden_state=True)

    reference = load_reference(tmp_path, "bfloat16", "cuda")
    expected = alone(reference, tokens, lengths)
    exact = alone(load_reference(tmp_path, "float32", "cuda"), tokens, lengths)
    for ours, theirs, truth in zip(by_layer(captured, 4), expected, exact, strict=True):
        ours = ours[: sum(lengths)]
        # As near to the truth as transformers' own bfloat16 (a router of experts may flip on a rounding).
        assert np.isclose(largest_error(ours, truth), largest_error(theirs, truth), rtol=1.0, atol=0.02)
        mean_error = ((ours.float() - truth).abs().mean() / truth.abs().mean()).item()
        assert mean_error < 0.02


@pytest.mark.parametrize(
    ("family", "dtype", "because"), [("gemma2", "bfloat16", "soft-capped"), ("qwen3", "float32", "torch.float32")]
)
def test_attention_per_document(family: Family, dtype: str, because: str, tmp_path: Path) -> None:
    save_tiny_target(tmp_path, family)
    forward = PackedForward(load_tiny_target(tmp_path, dtype, "cuda").model)
    assert because in forward.attention
    tokens = random_tokens(sum(LENGTHS) + 13)

    captured = forward.capture(tokens, LENGTHS, range(4), last_hidden_state=False)

    exact = alone(load_reference(tmp_path, "float32", "cuda"), tokens, LENGTHS)
    for ours, truth in zip(by_layer(captured, 4), exact, strict=True):
        assert largest_error(ours[: sum(LENGTHS)], truth) < (0.04 if dtype == "bfloat16" else 1e-3)
        assert ours.device.type == "cuda"
        assert not ours[sum(LENGTHS) :].any()


def test_weights_go_to_the_device_and_frozen_ones_come_back(tmp_path: Path) -> None:
    from slipstream.run_spec.spec import TargetSpec
    from target_server.target_model import TargetModel

    target = TargetModel.load(TargetSpec(model=str(save_tiny_target(tmp_path)), dtype="bfloat16"), device="cuda")
    assert target.device == torch.device("cuda", 0)
    assert {weight.device.type for weight in target.frozen_weights().values()} == {"cpu"}


@pytest.mark.parametrize(("family", "kinds"), [("llama", 1), ("qwen3", 1), ("gemma3", 2)])
def test_compiled_layers(family: Family, kinds: int, tmp_path: Path) -> None:
    save_tiny_target(tmp_path, family)
    forward = PackedForward(load_tiny_target(tmp_path, "bfloat16", "cuda").model, backend="inductor")
    rows = sum(LONG_LENGTHS)
    assert forward.prepare(rows) == kinds
    assert forward.is_recorded(rows), "so small a model is launched slower than it is computed"
    # Other documents in one recording, more of them, and the first again.
    for seed, lengths in enumerate((LONG_LENGTHS, LENGTHS, (10,) * 60, (300, 1, 400), LONG_LENGTHS)):
        tokens = random_tokens(rows, seed)
        captured = forward.capture(tokens, lengths, range(4), last_hidden_state=True)
        exact = alone(load_reference(tmp_path, "float32", "cuda"), tokens, lengths)
        for ours, truth in zip(by_layer(captured, 4), exact, strict=True):
            used = ours[: sum(lengths)]
            assert ((used.float() - truth).abs().mean() / truth.abs().mean()).item() < 0.02
            assert not ours[sum(lengths) :].any()
    assert forward._graphs[rows]._recordings.keys() == {
        (count, longest, (0, 1, 2, 3)) for count, longest in ((16, 768), (16, 1024), (64, 512), (16, 512))
    }


@pytest.mark.parametrize("compiled", [False, True])
def test_packs_lie_in_their_slots_while_the_next_is_computed(compiled: bool, tmp_path: Path) -> None:
    """The engine as it runs: two packs under way, copies on a stream of their own, slots read afterwards."""
    from slipstream.run_spec.spec import TargetSpec
    from slipstream.wire.codec import view_tensor
    from target_server.lease_ledger import Ask
    from target_server.subscription import SubscriptionTerms
    from target_server.target_model import TargetModel
    from tests.fakes.served_model import data_spec_json, write_conversations, write_tiny_target
    from tests.fakes.stepped_target import SteppedTarget

    spec = TargetSpec(model=str(write_tiny_target(tmp_path / "model")), dtype="bfloat16", compile=compiled)
    engine = SteppedTarget(TargetModel.load(spec, device="cuda"), tmp_path / "ledger.sqlite")
    conversations = write_conversations(tmp_path / "conversations.jsonl")
    terms = SubscriptionTerms("runs/a", data_spec_json(conversations), (0, 2), False, 1)
    name, stream_name = engine.join(terms)
    stream = engine.catalog.get(stream_name)
    engine.ledger.lease(name, Ask(1, 4))
    works = [engine.queue.next_work(0.0) for _ in range(4)]
    for work in works:
        assert work is not None
        engine.producer._launch(work)
    engine.producer._settle()
    for work in works:
        assert work is not None
        pack = stream.sequence.pack(work.sequence_number)
        expected = engine.target.capture(pack.token_ids, pack.document_lengths, (0, 2), False)
        slot = stream.arena.slot(work.slot.index)
        for tensor in stream.layout.specs:
            if tensor.name in expected:
                assert torch.equal(view_tensor(slot, tensor), expected[tensor.name].cpu())
    assert len(engine.ledger.lease(name, Ask(1, 4)).leases) == 4
    engine.close()


def test_a_recording_cut_short_leaves_nothing_behind() -> None:
    """What waits for the device cannot be recorded. Packs go on, and what copies have read comes back."""
    device = torch.device("cuda", 0)

    def run(_documents: object, tokens: Tensor, _positions: object, _layers: object) -> dict[int, Tensor]:
        return {0: torch.full((len(tokens), 64), float(tokens.sum().item()), device=device)}

    graphs = ForwardGraphs(256, device, per_document, run)
    tokens, computing = torch.arange(256), torch.cuda.current_stream()
    assert graphs.run(tokens, tokens, (256,), (0,)) is None
    assert torch.cuda.current_stream() == computing
    assert graphs.run(tokens, tokens, (256,), (0,)) is None, "refused once, refused for good"
    copies, states_bytes = torch.cuda.Stream(), 4 << 20

    def active() -> int:
        return torch.cuda.memory_stats()["active_bytes.all.current"]

    before = active()
    for _ in range(50):
        states = torch.zeros(states_bytes // 4, device=device)
        copies.wait_stream(computing)
        states.record_stream(copies)
        del states
        torch.cuda.synchronize()
    assert active() - before < 4 * states_bytes
    torch.cuda.empty_cache()


def test_flash_attention_4_where_it_is_installed(tmp_path: Path) -> None:
    """Windows and shared key heads included; its absence is not an error."""
    pytest.importorskip("flash_attn.cute", reason="flash-attn-4 is not installed")
    device, lengths = torch.device("cuda", 0), (700, 1, 300, 23)
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((1, sum(lengths), heads, 128) for heads in (6, 2, 2))
    query, key, value = (
        torch.randn(shape, device=device, generator=generator, dtype=torch.bfloat16).transpose(1, 2) for shape in shapes
    )
    for window in (None, 64):
        traits = AttentionTraits(128**-0.5, window, None, 128, 128)
        kernel, name = choose_kernel([traits], device, torch.bfloat16)
        assert name == (FLASH_4 if torch.cuda.get_device_capability(device) >= (9, 0) else FLASH_2)
        documents = PackedDocuments(lengths, device, kernel)
        found = kernel(query, key, value, traits, documents).float()
        exact = per_document(query.float(), key.float(), value.float(), traits, documents)
        assert (found - exact).abs().max() < 0.02
