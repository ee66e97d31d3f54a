"""When flash-attn 4 takes over from torch's kernel. What it computes on a GPU is in tests/gpu."""

import importlib.util
import logging
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from target_server import flash_attention_4
from target_server.attention import AttentionTraits, Kernel, PackedDocuments, per_document
from target_server.flash_attention_4 import flash_4_kernel

CPU = torch.device("cpu")
LAYER = AttentionTraits(128**-0.5, None, None, 128, 128)


def too_large(query: Tensor, key: Tensor, value: Tensor, traits: AttentionTraits, documents: PackedDocuments) -> Tensor:
    return per_document(query, key, value, traits, documents) * 1.1


def raising(*_arguments: object) -> Tensor:
    raise RuntimeError("no such instruction\nand much more")


def chosen(monkeypatch: pytest.MonkeyPatch, kernel: Kernel, layer: AttentionTraits = LAYER) -> Kernel | None:
    """As if the package were there, with this kernel in it, on a new enough GPU."""
    monkeypatch.setattr(flash_attention_4, "_is_installed", lambda: True)
    monkeypatch.setattr(flash_attention_4, "_make_kernel", lambda: kernel)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    return flash_4_kernel([LAYER, layer], CPU, torch.float32, per_document)


def test_a_kernel_that_agrees_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    window = AttentionTraits(128**-0.5, 64, None, 128, 128)
    assert chosen(monkeypatch, per_document, window) is per_document


@pytest.mark.parametrize(("kernel", "why"), [(too_large, "something else"), (raising, "RuntimeError: no such")])
def test_one_that_does_not_is_left_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kernel: Kernel, why: str
) -> None:
    with caplog.at_level(logging.WARNING):
        assert chosen(monkeypatch, kernel) is None
    assert [record.message for record in caplog.records] == ["flash_attention_4_not_used"]
    assert why in str(vars(caplog.records[0]))


def test_another_package_of_the_name_that_cannot_be_loaded_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """flash-attn 2 that was built for another torch fails so when it is imported, and it is around flash-attn 4."""
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text('raise ImportError("flash_attn_2_cuda.so: undefined symbol")')
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    with caplog.at_level(logging.WARNING):
        assert flash_4_kernel([LAYER], CPU, torch.float32, per_document) is None
    assert [record.message for record in caplog.records] == ["flash_attention_4_not_used"]
    assert "undefined symbol" in str(vars(caplog.records[0]))


def test_small_heads_stay_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, raising, AttentionTraits(64**-0.5, None, None, 64, 64)) is None


def test_without_the_package_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("flash_attn") is not None:
        pytest.skip("flash_attn is installed")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    assert flash_4_kernel([LAYER], CPU, torch.float32, per_document) is None
