"""SGLang: a flat Qwen3 configuration with `dflash_config`; tensors alone. Also what SpecForge writes."""

from typing import Any

import torch

from drafter_trainer.formats.drafter_format import DrafterFormat, Verifier
from drafter_trainer.formats.published_config import ConfigReader, PublishedConfig, qwen3_fields, read_qwen3_fields


class SglangFormat(DrafterFormat):
    """Numbers of target layers are zero-based, as ours."""

    name = "sglang"

    def config_json(
        self,
        config: PublishedConfig,
        verifier: Verifier,  # noqa: ARG002 - SGLang is told the target on its command line
        dtype: torch.dtype,
    ) -> dict[str, Any]:
        """The flat configuration."""
        return qwen3_fields(config) | {
            "architectures": ["DFlashDraftModel"],
            "block_size": config.block_size,
            "num_target_layers": config.num_target_layers,
            "dflash_config": {
                "target_layer_ids": list(config.target_layer_ids),
                "mask_token_id": config.mask_token_id,
            },
            "dtype": str(dtype).removeprefix("torch."),
        }

    def parse_config(self, values: dict[str, Any], where: str) -> PublishedConfig:
        """`block_size` may also lie in `dflash_config`, where newer checkpoints keep it."""
        top = ConfigReader(values, where)
        architectures = values.get("architectures")
        if architectures is not None:
            top.require("architectures", ["DFlashDraftModel"])
        dflash = top.table("dflash_config")
        # Relatives of DFlash keep another head, or other slots, under these keys.
        dflash.require("projector_type", None)
        dflash.require("shift_label", None, False)
        dflash.require("pure_draft_prefix_len", None, 0)
        top.require("draft_vocab_size", None, values.get("vocab_size"))
        block_size = (top if "block_size" in values else dflash).block_size()
        return PublishedConfig(
            **read_qwen3_fields(top),
            target_layer_ids=dflash.integers("target_layer_ids"),
            mask_token_id=dflash.integer("mask_token_id", at_least=0),
            block_size=block_size,
            num_target_layers=top.integer("num_target_layers") if values.get("num_target_layers") else None,
        )

    def recognises(self, values: dict[str, Any]) -> bool:
        """Flat, and without code."""
        return "dflash_config" in values and "auto_map" not in values
