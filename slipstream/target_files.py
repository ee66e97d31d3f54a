"""Where a target's files are: a local directory, a hub snapshot, or one GGUF file. No torch here."""

import json
from dataclasses import dataclass
from pathlib import Path

from slipstream.errors import SlipstreamError
from slipstream.hub_reach import connection_failures
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import TargetSpec

_WEIGHTS = "model.safetensors"
_WEIGHTS_INDEX = "model.safetensors.index.json"
_PICKLED_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# Any one of these makes a tokenizer; without all of them transformers may build one that knows no words.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
# Everything else that decides what the model and the tokenizer do.
_DESCRIPTION_PATTERNS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "additional_chat_templates/*.jinja")
_CODE_PATTERN = "*.py"
_CHECK_PATH = "Check the path; a model of a hub is OWNER/NAME."
MODEL_CARD = "README.md"
"""Its head names the model's licence; it is no part of what the model does."""


@dataclass(frozen=True)
class TargetFiles:
    """The files that make a target."""

    root: Path
    """The directory that holds them."""
    weights: tuple[Path, ...]
    """Safetensors shards, or the one GGUF file, which also holds configuration and tokenizer."""
    descriptions: tuple[Path, ...]
    """Configuration, tokenizer, chat template; modelling code if it is trusted."""
    revision: str | None
    """Commit of the hub snapshot; None for local files."""

    @property
    def is_gguf(self) -> bool:
        """Whether the target is one GGUF file."""
        return bool(self.weights) and self.weights[0].suffix == ".gguf"


def model_error(message: str, remedy: str) -> SlipstreamError:
    """A MODEL_INVALID error."""
    return SlipstreamError(message, reason=Reason.MODEL_INVALID, remedy=remedy)


def locate_target(spec: TargetSpec) -> TargetFiles:
    """Find the target's files; a hub name is downloaded into, or found in, the local hub cache.

    Raises:
        SlipstreamError: MODEL_INVALID, when there are none, some are missing, or the hub cannot be reached.
    """
    path = Path(spec.model).expanduser()
    if path.exists() and spec.revision is not None:
        raise model_error(
            f"target.revision is {spec.revision!r}, but {spec.model!r} is a path on this disk, which has no revisions.",
            "Remove target.revision, or give target.model as a hub name.",
        )
    if path.is_dir():
        return _files_of_directory(path, spec.model, spec.trust_remote_code)
    if path.is_file():
        if path.suffix != ".gguf":
            raise model_error(
                f"target.model {spec.model!r} is a file, but not a .gguf file.",
                "Name the directory that holds config.json and the weights, a .gguf file, or a hub name.",
            )
        return TargetFiles(path.parent, weights=(path,), descriptions=(), revision=None)
    if is_path(spec.model):
        raise model_error(f"target.model {spec.model!r} does not exist.", _CHECK_PATH)
    snapshot = _hub_snapshot(spec)
    return _files_of_directory(snapshot, spec.model, spec.trust_remote_code, revision=snapshot.name)


def locate_tokenizer(spec: TargetSpec) -> TargetFiles:
    """The same where only the tokenizer is wanted: weights are neither looked for nor downloaded.

    A GGUF file holds its tokenizer, so it is still the one file of `weights`, which is empty otherwise.

    Raises:
        SlipstreamError: MODEL_INVALID.
    """
    path = Path(spec.model).expanduser()
    if path.is_file() or path.suffix == ".gguf":
        return locate_target(spec)
    if not path.is_dir() and is_path(spec.model):
        raise model_error(f"{spec.model!r} does not exist.", _CHECK_PATH)
    if path.is_dir():
        _require_tokenizer(path, spec.model)
    root = path if path.is_dir() else _hub_snapshot(spec, weights=False)
    return TargetFiles(root, weights=(), descriptions=(), revision=None if path.is_dir() else root.name)


def files_at_hand(spec: TargetSpec) -> TargetFiles | None:
    """The directory or .gguf file of a target, or its copy in the local hub cache; nothing is downloaded, and weights
    in a directory are not looked for. None where this machine has nothing of it.

    Raises:
        SlipstreamError: MODEL_INVALID, what is there is no model.
    """
    if Path(spec.model).expanduser().exists():
        return locate_tokenizer(spec)
    if is_path(spec.model):
        return None
    from huggingface_hub import errors, snapshot_download

    try:
        root = Path(snapshot_download(spec.model, revision=spec.revision, local_files_only=True))
    except (errors.LocalEntryNotFoundError, errors.HFValidationError):
        return None
    return TargetFiles(root, weights=(), descriptions=(), revision=root.name)


def is_path(model: str) -> bool:
    """Whether a model's name can only be a path, wherever it leads; a hub name is NAME or OWNER/NAME."""
    return model.startswith((".", "/", "~")) or model.count("/") > 1 or model.endswith(".gguf")


def _files_of_directory(root: Path, name: str, with_code: bool, revision: str | None = None) -> TargetFiles:
    if not (root / "config.json").is_file():
        remedy = _gguf_in(root) or "Name a directory in the layout of transformers."
        raise model_error(f"The model directory {name!r} has no config.json.", remedy)
    weights = _weight_files(root, name)
    _require_tokenizer(root, name)
    patterns = (*_DESCRIPTION_PATTERNS, _CODE_PATTERN) if with_code else _DESCRIPTION_PATTERNS
    descriptions = sorted({file for pattern in patterns for file in root.glob(pattern)})
    return TargetFiles(root, weights=weights, descriptions=tuple(descriptions), revision=revision)


def _require_tokenizer(root: Path, name: str) -> None:
    if not any((root / file).is_file() for file in _TOKENIZER_FILES):
        raise model_error(
            f"The model directory {name!r} has no tokenizer: none of {', '.join(_TOKENIZER_FILES)}.",
            _gguf_in(root) or "Put the files of the model's tokenizer there.",
        )


def _gguf_in(root: Path) -> str | None:
    """What to do about a directory that a .gguf file lies in."""
    gguf = sorted(root.glob("*.gguf"))
    return f"Name the file itself: {gguf[0]}" if gguf else None


def _weight_files(root: Path, name: str) -> tuple[Path, ...]:
    if (root / _WEIGHTS_INDEX).is_file():
        shards = tuple(root / shard for shard in _shard_names(root / _WEIGHTS_INDEX, name))
        missing = [shard.name for shard in shards if not shard.is_file()]
        if missing:
            raise model_error(
                f"The model directory {name!r} lacks {len(missing)} of {len(shards)} weight files: {missing[0]}"
                + (", …" if len(missing) > 1 else ""),
                "Copy or download the missing files.",
            )
        return shards
    if (root / _WEIGHTS).is_file():
        return (root / _WEIGHTS,)
    pickled = sorted(file.name for pattern in _PICKLED_WEIGHTS for file in root.glob(pattern))
    if pickled:
        raise model_error(
            f"The model directory {name!r} has only pickled weights ({pickled[0]}), which can run code when read.",
            "Save the model as safetensors.",
        )
    raise model_error(
        f"The model directory {name!r} has no weights: neither {_WEIGHTS} nor {_WEIGHTS_INDEX}.",
        "Put the safetensors files of the model there.",
    )


def _shard_names(index: Path, name: str) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise model_error(
            f"{index.name} of the model directory {name!r} cannot be read: {error!r}.", "Copy or download it again."
        ) from error


def _hub_snapshot(spec: TargetSpec, *, weights: bool = True) -> Path:
    """Download what is needed of a hub model, or find it in the local cache."""
    from huggingface_hub import errors, snapshot_download

    named = f"{spec.model!r}" + (f" at revision {spec.revision!r}" if spec.revision else "")
    patterns = ["*.safetensors", *_DESCRIPTION_PATTERNS] if weights else [*_DESCRIPTION_PATTERNS]
    patterns.append(MODEL_CARD)
    try:
        return Path(
            snapshot_download(
                spec.model,
                revision=spec.revision,
                allow_patterns=[*patterns, _CODE_PATTERN] if spec.trust_remote_code else patterns,
                # Copies of the weights in the formats of other programs.
                ignore_patterns=["*/*.safetensors", "*/*.json", "consolidated*"],
            )
        )
    except errors.HFValidationError as error:
        raise model_error(
            f"target.model {spec.model!r} is neither a path on this disk nor a hub name.", "Check the spelling."
        ) from error
    except errors.GatedRepoError as error:
        raise model_error(
            f"The hub does not give out {named}: its licence has to be accepted first.",
            "Accept it on the model's page, then log in with `hf auth login` or set HF_TOKEN.",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise model_error(
            f"The hub has no model {spec.model!r}, or it is private, and it is no path on this disk.",
            "Check the spelling; for a private model set HF_TOKEN.",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise model_error(f"The hub has no {named}.", "Check target.revision.") from error
    except connection_failures() as error:
        # Covers an unreachable hub, offline mode without a cached copy, and HTTP errors.
        raise model_error(
            f"target.model {named} is no path on this disk, not complete in the hub cache, "
            f"and could not be downloaded ({type(error).__name__}).",
            "Check the network, or download the model elsewhere and name its directory: as target.model in a recipe, "
            "else with --model or --target-model, whichever the command has.",
        ) from error
