"""The interface of a format: one class each in `vllm.py`, `sglang.py` and `zlab.py`."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafter_trainer.formats.published_config import PublishedConfig, config_invalid
from drafter_trainer.formats.tensors import check_tensors, read_tensors
from drafter_trainer.safetensors_file import write_safetensors
from slipstream.disk import sync_directory, write_atomically
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
_SPECFORGE_STATE = "training_state.pt"


@dataclass(frozen=True)
class Verifier:
    """The target, as servers will know it."""

    name: str | None
    """Hub name or directory; None where servers could load neither."""
    architectures: tuple[str, ...]
    """As its config.json names them; empty when it was not looked at."""


@dataclass(frozen=True)
class PublishedDrafter:
    """A drafter read from one of the formats."""

    format_name: str
    config: PublishedConfig
    weights: dict[str, Tensor]
    """Names and shapes of `DFlashDrafter`; the dtype is the file's."""
    target_copies: dict[str, Tensor]
    """`embed_tokens.weight` and `lm_head.weight`, where the files repeat the target's; [V, D]."""


class DrafterFormat(ABC):
    """Writes and reads drafters in one layout."""

    name: str
    """What `--to` is called with."""
    optional_tensors: tuple[str, ...] = ()
    """Copies of the target's tensors that the files may hold."""

    @abstractmethod
    def config_json(self, config: PublishedConfig, verifier: Verifier, dtype: torch.dtype) -> dict[str, Any]:
        """The content of `config.json`.

        Raises:
            SlipstreamError: ENVIRONMENT_UNSUPPORTED, the engine cannot serve such a drafter.
        """

    @abstractmethod
    def parse_config(self, values: dict[str, Any], where: str) -> PublishedConfig:
        """The other direction; `where` names the file in errors.

        Raises:
            SlipstreamError: CHECKPOINT_INVALID.
        """

    @abstractmethod
    def recognises(self, values: dict[str, Any]) -> bool:
        """Whether a `config.json` is of this format."""

    def write(
        self, directory: Path, config: PublishedConfig, weights: Mapping[str, Tensor], verifier: Verifier
    ) -> None:
        """Write configuration and tensors, of one dtype, into an existing directory, flushed to the disk.

        Raises:
            SlipstreamError: ENVIRONMENT_UNSUPPORTED; CHECKPOINT_INVALID, the weights are not those of `config`.
            OSError: the file system refused.
        """
        check_tensors(weights, config, (), str(directory))
        dtype = next(iter(weights.values())).dtype
        values = self.config_json(config, verifier, dtype)
        write_safetensors(directory / WEIGHTS, dict(sorted(weights.items())), {"format": "pt"})
        write_atomically(directory / CONFIG, json.dumps(values, indent=2, sort_keys=True) + "\n")
        for name, text in self.extra_files().items():
            write_atomically(directory / name, text)
        sync_directory(directory)

    def extra_files(self) -> dict[str, str]:
        """Texts beside configuration and tensors, by name."""
        return {}

    def read(self, directory: Path) -> PublishedDrafter:
        """Read and check.

        Raises:
            SlipstreamError: CHECKPOINT_INVALID, naming the file, what was found and what was expected.
        """
        config = self.parse_config(read_config(directory), str(directory / CONFIG))
        tensors = read_tensors(directory)
        check_tensors(tensors, config, self.optional_tensors, str(directory))
        copies = {name: tensors.pop(name) for name in self.optional_tensors if name in tensors}
        return PublishedDrafter(self.name, config, tensors, copies)

    def check(self, directory: Path, config: PublishedConfig, weights: Mapping[str, Tensor]) -> None:
        """Read back what was written and compare bit for bit.

        Raises:
            SlipstreamError: CHECKPOINT_INVALID.
        """
        found = self.read(directory)
        missing = () if found.config.num_target_layers else ("num_target_layers",)
        ours = {name: value for name, value in vars(config).items() if name not in missing}
        theirs = {name: value for name, value in vars(found.config).items() if name not in missing}
        wrong = [f"{name} is {theirs[name]!r}, {value!r} was written" for name, value in ours.items()
                 if theirs[name] != value]  # fmt: skip
        wrong += [f"{name} has other values" for name, tensor in weights.items()
                  if not same_bits(tensor, found.weights[name])]  # fmt: skip
        wrong += [f"{name} has other text" for name, text in self.extra_files().items()
                  if (directory / name).read_text(encoding="utf-8") != text]  # fmt: skip
        if wrong:
            raise config_invalid(f"{directory} does not read back as it was written: {'; '.join(wrong)}")


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal dtype, shape and bits; two NaN of equal bits are equal."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    bits = (tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(*bits)


def read_config(directory: Path) -> dict[str, Any]:
    """The content of `config.json`.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID.
    """
    path = directory / CONFIG
    if (directory / _SPECFORGE_STATE).exists() and not path.exists():
        raise SlipstreamError(
            f"{directory} is a training checkpoint of SpecForge ({_SPECFORGE_STATE}, a pickle), expected {CONFIG} and "
            "safetensors",
            reason=Reason.CHECKPOINT_INVALID,
            remedy="Export it first: specforge export --to hf --checkpoint DIR --draft-config FILE --output-dir OUT",
        )
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else f"no JSON: {error}"
        raise config_invalid(f"{path} cannot be read ({why})") from error
    if not isinstance(values, dict):
        raise config_invalid(f"{path} is a JSON {type(values).__name__}, expected an object")
    return values
