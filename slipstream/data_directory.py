"""Which files below a directory are data, and which of them train, by their names. No torch here.

The target server reads them; who only says something of a run's data must mean the same ones.
"""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from slipstream.answers_settings import SETTINGS_SUFFIX

DATA_SUFFIXES = (".jsonl", ".jsonl.gz", ".ndjson", ".json", ".json.gz", ".parquet", ".arrow")

_DESCRIPTIONS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
"""Hugging Face's, of the data beside them."""
_TRAIN = re.compile(r"(?<![a-z])train(?![a-z])", re.IGNORECASE)


def data_files(directory: Path) -> list[Path]:
    """All below it, by path; nothing hidden."""
    return sorted(_walked(directory), key=lambda path: path.as_posix())


def training_files(directory: Path, files: Sequence[Path]) -> list[Path]:
    """Of the data files of a directory: those of the `train` split, where names tell one from others; else all."""
    training = [file for file in files if _TRAIN.search(file.relative_to(directory).as_posix())]
    return training or list(files)


def _walked(directory: Path) -> Iterator[Path]:
    for root, directories, names in os.walk(directory):
        directories[:] = [name for name in directories if not name.startswith(".")]
        for name in names:
            is_description = name in _DESCRIPTIONS or name.endswith(SETTINGS_SUFFIX)
            if name.endswith(DATA_SUFFIXES) and not is_description and not name.startswith("."):
                yield Path(root, name)
