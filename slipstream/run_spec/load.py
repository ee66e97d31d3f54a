"""Recipes: a TOML file plus dotted overrides becomes a RunSpec, and every value knows where it came from."""

import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from slipstream.drafter_name import drafter_name
from slipstream.errors import SlipstreamError
from slipstream.model_names import is_hub_model
from slipstream.run_spec.data_entries import is_hub_name
from slipstream.run_spec.locate import key_lines
from slipstream.run_spec.overrides import Override, apply_overrides, parse_override
from slipstream.run_spec.problems import problems_of
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import RunSpec
from slipstream.run_spec.suggestions import nearest

DEFAULT = "default"
OVERRIDE = "override"


@dataclass(frozen=True)
class LoadedSpec:
    """A run definition with its provenance."""

    spec: RunSpec
    origins: Mapping[str, str]
    """Dotted key of every setting → `default`, `recipe.toml:LINE` or `override`."""


class SpecInvalidError(SlipstreamError):
    """A definition that is no run; `problems` has the dotted key and the line of text of each."""

    def __init__(self, message: str, *, problems: Sequence[tuple[str, str]], remedy: str = "") -> None:
        super().__init__(message, reason=Reason.SPEC_INVALID, remedy=remedy)
        self.problems = tuple(problems)


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> LoadedSpec:
    """Read a recipe, apply the overrides in order (a later one wins) and check the whole.

    Relative data and prompt files, and a target model that exists there or starts with ./ or ../, are resolved
    against the recipe's directory, and so is a first drafter that `drafter_name` takes for a path; any other model
    name is left for the hub. A file that ends in .json holds a resolved definition, such as a run directory's
    spec.json: paths in it are left as they are.

    Raises:
        SlipstreamError: SPEC_INVALID, listing every error with its line; CHECKPOINT_INVALID, drafter.init_from is an
            address of the web.
    """
    text = _read(path)
    if path.suffix == ".json":
        return _load_definition(text, path, overrides)
    recipe = _parse(text, path)
    changes = [parse_override(override) for override in overrides]
    apply_overrides(recipe, changes)
    sources = _sources(text, path, changes)
    spec = _validate(recipe, path, sources)
    origins = {key: _origin(key, sources) for key, _ in _leaves(spec)}
    return LoadedSpec(_resolve_paths(spec, path.absolute().parent), origins)


def parse_recipe(text: str, overrides: Sequence[str] = (), *, name: str = "recipe.toml") -> RunSpec:
    """The same for a recipe that did not come from a file of this machine; paths in it are left as they are.

    Raises:
        SlipstreamError: SPEC_INVALID, as load_recipe does.
    """
    recipe = _parse(text, Path(name))
    changes = [parse_override(override) for override in overrides]
    apply_overrides(recipe, changes)
    return _validate(recipe, Path(name), _sources(text, Path(name), changes))


def parse_spec(table: Mapping[str, Any], overrides: Sequence[str] = ()) -> RunSpec:
    """A run from its definition as JSON, read as strictly as a recipe; paths in it are left as they are.

    Raises:
        SlipstreamError: SPEC_INVALID.
    """
    definition: dict[str, Any] = json.loads(json.dumps(table))
    changes = [parse_override(override) for override in overrides]
    apply_overrides(definition, changes)
    return _validate(definition, Path("spec"), _sources("", Path("spec"), changes))


def _load_definition(text: str, path: Path, overrides: Sequence[str]) -> LoadedSpec:
    try:
        table = json.loads(text)
    except ValueError as error:
        table = str(error)
    if not isinstance(table, dict):
        raise SlipstreamError(
            f"{path} holds no run definition: {table if isinstance(table, str) else 'no JSON object'}.",
            reason=Reason.SPEC_INVALID,
            remedy="Give a recipe (.toml), or the spec.json of a run directory.",
        )
    spec = parse_spec(table, overrides)
    return LoadedSpec(spec, {key: path.name for key, _ in _leaves(spec)})


def canonical_json(section: BaseModel) -> str:
    """The one JSON text of a section: sorted keys, no blanks. Equal sections give equal bytes."""
    return json.dumps(
        section.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def describe(loaded: LoadedSpec) -> str:
    """The resolved run as a TOML document that loads to the same run; a comment says where each value came from."""
    rows: list[tuple[str, str]] = []
    table = ""
    for key, value in _leaves(loaded.spec):
        parent, _, leaf = key.rpartition(".")
        if parent != table:
            rows += [("", ""), (f"[{parent}]", "")]
            table = parent
        setting = f"# {leaf} is not set" if value is None else f"{leaf} = {_toml(value)}"
        rows.append((setting, loaded.origins[key]))
    width = min(60, max(len(setting) for setting, _ in rows))
    return "\n".join(f"{setting:<{width}}  # {origin}" if origin else setting for setting, origin in rows) + "\n"


def _read(path: Path) -> str:
    try:
        # A byte order mark is invisible in an editor, so it is taken off and not reported as an error in column 1.
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        neighbours = sorted(entry.name for entry in path.parent.glob("*.toml"))
        close = nearest(path.name, neighbours)
        raise SlipstreamError(
            f"no recipe at {path}.",
            reason=Reason.SPEC_INVALID,
            remedy=f"Did you mean {path.parent / close}?" if close else _rather_a_recipe(path),
        ) from None
    except IsADirectoryError:
        inside = sorted(path.glob("*.toml"))
        raise SlipstreamError(
            f"{path} is a directory, not a recipe.",
            reason=Reason.SPEC_INVALID,
            remedy=f"Did you mean {inside[0]}?" if inside else _rather_a_recipe(path),
        ) from None
    except UnicodeDecodeError as error:
        raise SlipstreamError(
            f"{path} is not UTF-8 text (byte {error.start}), so it is no recipe.",
            reason=Reason.SPEC_INVALID,
            remedy=_rather_a_recipe(path) if path.suffix != ".toml" else "Save the recipe as UTF-8.",
        ) from None
    except OSError as error:
        raise SlipstreamError(
            f"cannot read {path}: {os.strerror(error.errno or 0)}.",
            reason=Reason.SPEC_INVALID,
            remedy="Give the path of a readable .toml file.",
        ) from None


def _rather_a_recipe(path: Path) -> str:
    """What to give in place of it; a model where a recipe belongs is a likely mistake."""
    is_hub_name = is_hub_model(str(path)) and path.suffix not in (".toml", ".json") and not path.parent.exists()
    if is_hub_name or path.suffix in (".gguf", ".safetensors") or (path / "config.json").is_file():
        return f"Give a .toml file. A model is named with --model {path}, or with --set target.model={path}."
    return "Give the path of a .toml file."


def _parse(text: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message, _, position = str(error).partition(" (at ")
        numbers = re.findall(r"\d+", position)
        line, column = numbers if len(numbers) == 2 else (str(text.rstrip("\n").count("\n") + 1), "end")
        raise SlipstreamError(
            f"{path}:{line}:{column}: broken TOML: {message}.",
            reason=Reason.SPEC_INVALID,
            remedy="Strings are quoted, tables are [in brackets], every setting is key = value on its own line.",
        ) from None


def _origin(key: str, sources: Mapping[str, str]) -> str:
    """Where a setting came from; of a table's entries, the last that was set."""
    inside = [source for name, source in sources.items() if name.startswith(f"{key}.")]
    return sources.get(key) or (inside[-1] if inside else DEFAULT)


def _sources(text: str, path: Path, overrides: Sequence[Override]) -> dict[str, str]:
    """Where every key and table was set, by dotted key."""
    sources = {key: f"{path.name}:{line}" for key, line in key_lines(text).items()}
    for override in overrides:
        for key in [key for key in sources if key == override.key or key.startswith(override.key + ".")]:
            del sources[key]
        if override.remove:
            continue
        sources[override.key] = OVERRIDE
        if isinstance(override.value, dict):
            sources.update((f"{override.key}.{key}", OVERRIDE) for key in _table_keys(override.value))
    return sources


def _table_keys(table: Mapping[str, Any]) -> Iterator[str]:
    for key, value in table.items():
        yield key
        if isinstance(value, dict):
            yield from (f"{key}.{inner}" for inner in _table_keys(value))


def _validate(recipe: dict[str, Any], path: Path, sources: Mapping[str, str]) -> RunSpec:
    # Strict JSON mode takes nothing for something else ("100" is no number, true is no 1), yet arrays for tuples.
    try:
        return RunSpec.model_validate_json(json.dumps(recipe, default=str), strict=True)
    except ValidationError as invalid:
        problems = problems_of(invalid, sources)
    raise SpecInvalidError(
        f"{path} does not define a run:\n  " + "\n  ".join(text for _, text in problems),
        problems=problems,
        remedy=f"Correct this; `slipstream recipe show {path}` then prints the resolved run.",
    )


def _leaves(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting with its dotted key, in the order of declaration; a section's own before its inner tables'."""
    fields = [(name, getattr(section, name)) for name in type(section).model_fields]
    for name, value in sorted(fields, key=lambda field: isinstance(field[1], BaseModel)):
        if isinstance(value, BaseModel):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _resolve_paths(spec: RunSpec, directory: Path) -> RunSpec:
    files = tuple(file if is_hub_name(file) else _absolute(file, directory) for file in spec.data.files)
    prompts = spec.eval.prompts and _absolute(spec.eval.prompts, directory)
    heldout = spec.eval.heldout and _absolute(spec.eval.heldout, directory)
    init_from = spec.drafter.init_from and _resolve_drafter(spec.drafter.init_from, directory)
    return spec.model_copy(
        update={
            "target": spec.target.model_copy(update={"model": _resolve_model(spec.target.model, directory)}),
            "data": spec.data.model_copy(update={"files": files}),
            "drafter": spec.drafter.model_copy(update={"init_from": init_from}),
            "eval": spec.eval.model_copy(update={"prompts": prompts, "heldout": heldout}),
        }
    )


def _resolve_model(model: str, directory: Path) -> str:
    # A .gguf is a file even where it is missing, so that the error names the place that was searched.
    is_path = model.startswith(("./", "../", "~", "/")) or model.endswith(".gguf") or (directory / model).exists()
    return _absolute(model, directory) if is_path else model


def _resolve_drafter(text: str, directory: Path) -> str:
    named = drafter_name(text, directory)
    return str(named) if isinstance(named, Path) else text


def _absolute(file: str, directory: Path) -> str:
    # Path.expanduser raises on an unknown ~user; here the error belongs to whoever opens the file.
    return os.path.normpath(directory / os.path.expanduser(file))  # noqa: PTH111


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {_toml(item)}' for key, item in value.items())}}}"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)
