"""The fingerprint follows content, not place."""

import shutil
from pathlib import Path

import pytest

from slipstream import target_fingerprint
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import TargetSpec
from slipstream.target_files import TargetFiles, locate_target
from slipstream.target_fingerprint import fingerprint_target
from target_server.target_model import TargetModel
from tests.unit.target_model.document_alone import save_tiny_target


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save_tiny_target(tmp_path / "model")


def files_of(directory: Path, **spec: object) -> TargetFiles:
    return locate_target(TargetSpec(model=str(directory), **spec))  # type: ignore[arg-type]


def test_a_copy_elsewhere_has_the_same_fingerprint(directory: Path, tmp_path: Path) -> None:
    shutil.copytree(directory, tmp_path / "copy")
    ours = fingerprint_target(files_of(directory), "float32")
    assert ours == fingerprint_target(files_of(tmp_path / "copy"), "float32")
    assert len(ours) == 64
    assert int(ours, 16)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"])
def test_one_changed_byte_changes_it(directory: Path, file: str) -> None:
    before = fingerprint_target(files_of(directory), "float32")
    content = bytearray((directory / file).read_bytes())
    content[-2] ^= 1
    (directory / file).write_bytes(content)
    assert fingerprint_target(files_of(directory), "float32") != before


def test_dtype_and_revision_are_part_of_it_and_foreign_files_are_not(directory: Path) -> None:
    files = files_of(directory)
    before = fingerprint_target(files, "float32")
    pinned = TargetFiles(files.root, files.weights, files.descriptions, revision="a" * 40)
    (directory / "README.md").write_text("notes")
    (directory / "modeling.py").write_text("code")

    assert fingerprint_target(files_of(directory), "float32") == before
    assert len({before, fingerprint_target(files, "bfloat16"), fingerprint_target(pinned, "float32")}) == 3
    assert fingerprint_target(files_of(directory, trust_remote_code=True), "float32") != before


def test_files_of_many_blocks(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Order counts: two blocks that change places change the fingerprint."""
    monkeypatch.setattr(target_fingerprint, "_BLOCK_BYTES", 1000)
    before = fingerprint_target(files_of(directory), "float32")
    content = (directory / "model.safetensors").read_bytes()
    swapped = content[:20_000] + content[21_000:22_000] + content[20_000:21_000] + content[22_000:]
    assert sorted(swapped) == sorted(content)
    assert swapped != content
    (directory / "model.safetensors").write_bytes(swapped)
    assert fingerprint_target(files_of(directory), "float32") != before


def test_a_file_that_went_away(directory: Path) -> None:
    files = files_of(directory)
    (directory / "config.json").unlink()
    with pytest.raises(SlipstreamError, match=r"config\.json") as caught:
        fingerprint_target(files, "float32")
    assert caught.value.reason is Reason.MODEL_INVALID


def test_a_loaded_target_carries_it(directory: Path) -> None:
    target = TargetModel.load(TargetSpec(model=str(directory), dtype="float32"), device="cpu")
    assert target.fingerprint == fingerprint_target(files_of(directory), "float32")
    assert (target.model_id, target.revision, str(target.device)) == ("model", None, "cpu")
    assert set(target.frozen_weights()) == {"embed_tokens.weight", "lm_head.weight", "norm.weight"}
