"""Whose answers a run learns from, as far as files say: `data regenerate` writes who answered beside the answers.

A drafter that learned what another model says is accepted at about one token a round, whatever its loss: where that
may be the reason, people are told so. No torch here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import recipes
from slipstream.answers_settings import SETTINGS_SUFFIX, read_settings
from slipstream.data_directory import data_files, training_files
from slipstream.run_spec.data_entries import GLOB, is_hub_name, split_glob
from slipstream.target_files import is_path

REMEDY = "`slipstream data regenerate RECIPE --to FILE` lets the target answer; train on that file."
_SHIPPED_FOR = "smollm2-135m-instruct"
"""Part of the names of the model that wrote the answers which ship."""


@dataclass(frozen=True)
class Unproven:
    """The first of a run's files that is not shown to hold the target's own answers."""

    file: str
    """Its name, or the entry of `data.files` that is not on this machine."""
    written_by: str | None
    """The model that answered, without the directories of this machine; None: nothing says who did, or it is called as
    the target is: a copy of a hub's model has another fingerprint, and a later model of that name, too."""
    fingerprint: str | None
    """Of the model that answered."""


def first_unproven(entries: Sequence[str], model: str, fingerprints: Sequence[str] = ()) -> Unproven | None:
    """Look for answers that are not known to be the target's own; None where all are. What another model
    has signed comes before what nobody has.

    Args:
        entries: `data.files`.
        model: the target as the recipe names it.
        fingerprints: of the target, one for each dtype; none: the last parts of names are compared.
    """
    found = [one for entry in entries for one in _unproven(entry, model, fingerprints)]
    known = [one for one in found if one.written_by is not None]
    return next(iter(known or found), None)


def answers_remark(entries: Sequence[str], model: str) -> str | None:
    """What to know before a run learns from these files; None where the target of that name wrote them."""
    found = first_unproven(entries, model)
    if found is None:
        return None
    whose = "nothing says who wrote" if found.written_by is None else f"{found.written_by}, not the target, wrote"
    return f"{whose} the answers in {found.file}; a drafter is accepted for what its own target says: {REMEDY}"


def _unproven(entry: str, model: str, fingerprints: Sequence[str]) -> Iterator[Unproven]:
    if recipes.data_file(entry) is not None and _SHIPPED_FOR in model.casefold():
        return
    files = [] if is_hub_name(entry) else _files_of(Path(entry))
    if not files:
        yield Unproven(entry, None, None)
    for file in files:
        # Also where the file was compressed afterwards.
        settings = read_settings(file) or read_settings(file.with_name(file.name.removesuffix(".gz")))
        name, fingerprint = settings.get("target"), settings.get("target_fingerprint")
        # A directory here is often called as the model is at a hub, and elsewhere.
        is_namesake = name is not None and _last(str(name)) == _last(model)
        if not (fingerprint in fingerprints if fingerprints else is_namesake):
            named = _last(str(name)) if name and is_path(str(name)) else name
            other = str(named) if named and not is_namesake else None
            yield Unproven(file.name, other, str(fingerprint) if fingerprint else None)


def _last(name: str) -> str:
    return Path(name).name


def _files_of(path: Path) -> list[Path]:
    try:
        if path.is_dir():
            return training_files(path, data_files(path))
        if not path.exists() and GLOB.search(str(path)):
            directory, pattern = split_glob(path)
            found = (file for file in directory.glob(pattern) if not file.name.endswith(SETTINGS_SUFFIX))
            return sorted(file for file in found if file.is_file())
        return [path] if path.is_file() else []
    except (OSError, ValueError):  # not ours to look at, perhaps the target server's; or no pattern at all
        return []
