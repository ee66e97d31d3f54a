"""z-lab: SGLang's files and a modelling file, so that `AutoModel.from_pretrained(…, trust_remote_code=True)` loads it.

The code of a directory that is read is never run: its configuration and tensors say all.
"""

from pathlib import Path
from typing import Any

import torch

from drafter_trainer.formats import portable_dflash
from drafter_trainer.formats.drafter_format import Verifier
from drafter_trainer.formats.published_config import PublishedConfig
from drafter_trainer.formats.sglang import SglangFormat

_MODULE = "dflash"


class ZlabFormat(SglangFormat):
    """See the module."""

    name = "zlab"

    def config_json(self, config: PublishedConfig, verifier: Verifier, dtype: torch.dtype) -> dict[str, Any]:
        """The flat configuration, with the class that loads it."""
        return super().config_json(config, verifier, dtype) | {
            "auto_map": {"AutoModel": f"{_MODULE}.{portable_dflash.DFlashDraftModel.__name__}"}
        }

    def extra_files(self) -> dict[str, str]:
        """The modelling file."""
        return {f"{_MODULE}.py": Path(portable_dflash.__file__).read_text(encoding="utf-8")}

    def recognises(self, values: dict[str, Any]) -> bool:
        """Flat, and with code."""
        return "dflash_config" in values and "auto_map" in values
