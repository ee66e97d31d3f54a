"""What `data regenerate` records beside a file of answers: who wrote them, and with which settings. No torch here."""

import json
from pathlib import Path
from typing import Any

SETTINGS_SUFFIX = ".settings.json"


def settings_beside(answers: Path) -> Path:
    """Where the record of a file lies."""
    return answers.with_name(answers.name + SETTINGS_SUFFIX)


def read_settings(answers: Path) -> dict[str, Any]:
    """The record of a file; empty where there is none that can be read."""
    try:
        settings = json.loads(settings_beside(answers).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, dict) else {}
