"""Answers that the same target gave in another dtype are its own; those of other weights are not."""

import json
from pathlib import Path

from drafter_trainer.evaluation.whose_answers import unproven_answers
from slipstream.answers_settings import settings_beside
from slipstream.run_spec.load import load_recipe
from slipstream.target_files import locate_target
from slipstream.target_fingerprint import fingerprint_target
from tests.fakes.tiny_run import write_tiny_run


def test_another_dtype_is_no_other_target(tmp_path: Path) -> None:
    spec = load_recipe(write_tiny_run(tmp_path)).spec
    files = locate_target(spec.target)
    fingerprint = fingerprint_target(files, spec.target.dtype)
    conversations = tmp_path / "conversations.jsonl"
    assert unproven_answers(spec, fingerprint, spec.target) == {
        "file": "conversations.jsonl", "written_by": None, "fingerprint": None,
    }  # fmt: skip
    assert unproven_answers(spec, None, spec.target) is None, "a drafter of unknown data"

    record = {"target": "a-name", "target_fingerprint": fingerprint_target(files, "bfloat16")}
    settings_beside(conversations).write_text(json.dumps(record))
    assert unproven_answers(spec, fingerprint, spec.target) is None
    (tmp_path / "target" / "config.json").write_text("{}")
    assert unproven_answers(spec, fingerprint, spec.target) == {
        "file": "conversations.jsonl", "written_by": "a-name", "fingerprint": record["target_fingerprint"],
    }  # fmt: skip
