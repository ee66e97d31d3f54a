"""vLLM: the format of `speculators`, draft layers as a nested table.

Numbers of target layers are one higher here: they index transformers' `hidden_states`, whose first entry is what enters
layer 0. From one flag, `sliding_window_non_causal`, vLLM takes the causality of all layers, so that a drafter with full
(two-sided) and sliding (causal) layers cannot be written. In flat files (sglang.py) it goes by `layer_types` instead.
"""

from typing import Any

import torch

from drafter_trainer.drafter_config import FULL, SLIDING
from drafter_trainer.formats.drafter_format import DrafterFormat, Verifier
from drafter_trainer.formats.published_config import (
    ConfigReader,
    PublishedConfig,
    config_invalid,
    qwen3_fields,
    read_qwen3_fields,
)
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason

SPECULATORS_VERSION = "0.9.0"
"""The version whose files these are like."""


class VllmFormat(DrafterFormat):
    """See the module."""

    name = "vllm"
    optional_tensors = ("embed_tokens.weight", "lm_head.weight")

    def config_json(self, config: PublishedConfig, verifier: Verifier, dtype: torch.dtype) -> dict[str, Any]:
        """The nested configuration."""
        if len(set(config.layer_types)) > 1:
            raise SlipstreamError(
                f"this layout cannot hold the drafter: its layers are {list(config.layer_types)}, but one flag "
                "(sliding_window_non_causal) makes all of them causal or none; expected layers of one type",
                reason=Reason.ENVIRONMENT_UNSUPPORTED,
                remedy="Export it for sglang, whose files vLLM on a GPU is made to read too, or train a drafter whose "
                "layers are all of one type.",
            )
        layers = qwen3_fields(config)
        del layers["rope_theta"]  # nested files name it in rope_parameters alone
        return {
            "architectures": ["DFlashDraftModel"],
            "speculators_model_type": "dflash",
            "speculators_version": SPECULATORS_VERSION,
            "transformer_layer_config": layers,
            "draft_vocab_size": config.vocab_size,
            "target_hidden_size": None,
            "aux_hidden_state_layer_ids": [layer + 1 for layer in config.target_layer_ids],
            "mask_token_id": config.mask_token_id,
            "block_size": config.block_size,
            "sliding_window_non_causal": FULL in config.layer_types,
            "sample_from_anchor": False,
            "speculators_config": {
                "algorithm": "dflash",
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {
                        "proposal_type": "greedy",
                        "speculative_tokens": config.block_size - 1,
                        "verifier_accept_k": 1,
                        "accept_tolerance": 0.0,
                    }
                ],
                "verifier": {"name_or_path": verifier.name, "architectures": list(verifier.architectures)},
            },
            "tie_word_embeddings": False,
            "dtype": str(dtype).removeprefix("torch."),
        }

    def parse_config(self, values: dict[str, Any], where: str) -> PublishedConfig:
        """Full layers are two-sided in `speculators` whatever the flag says; sliding ones must be causal."""
        top = ConfigReader(values, where)
        _check_version(values.get("speculators_version"), where)
        top.require("speculators_model_type", "dflash")
        top.require("sample_from_anchor", False, None)
        fields = read_qwen3_fields(top.table("transformer_layer_config"))
        top.require("draft_vocab_size", fields["vocab_size"])
        top.require("target_hidden_size", None, fields["hidden_size"])
        if SLIDING in fields["layer_types"] and values.get("sliding_window_non_causal") not in (False, None):
            raise config_invalid(
                f"{where}: sliding_window_non_causal is {values['sliding_window_non_causal']!r} with layers "
                f"{list(fields['layer_types'])}, expected False or nothing where a layer slides: such a layer is causal"
            )
        layers = top.integers("aux_hidden_state_layer_ids")
        if layers[0] == 0:
            raise config_invalid(f"{where}: aux_hidden_state_layer_ids is {list(layers)}, expected numbers from 1 on")
        block_size = top.block_size()
        _check_slots(values, block_size, where)
        return PublishedConfig(
            **fields,
            target_layer_ids=tuple(layer - 1 for layer in layers),
            mask_token_id=top.integer("mask_token_id", at_least=0),
            block_size=block_size,
            num_target_layers=None,
        )

    def recognises(self, values: dict[str, Any]) -> bool:
        """By the key that speculators itself looks for."""
        return "speculators_model_type" in values


def _check_version(version: Any, where: str) -> None:
    known = tuple(map(int, SPECULATORS_VERSION.split(".")[:2]))
    parts = str(version).split(".") if version is not None else ["0"]
    numbers = tuple(int(part) for part in parts[:2] if part.isdigit())
    if numbers > known:
        raise SlipstreamError(
            f"{where}: speculators_version is {version!r}, expected at most {SPECULATORS_VERSION}",
            reason=Reason.CHECKPOINT_INVALID,
            remedy=f"Update Slipstream, or write the files with speculators {SPECULATORS_VERSION}.",
        )


def _check_slots(values: dict[str, Any], block_size: int, where: str) -> None:
    """As many tokens are proposed as slots predict."""
    table = values.get("speculators_config")
    methods = table.get("proposal_methods") if isinstance(table, dict) else None
    for method in methods if isinstance(methods, list) else []:
        proposed = method.get("speculative_tokens") if isinstance(method, dict) else None
        if proposed != block_size - 1:
            raise config_invalid(
                f"{where}: speculative_tokens is {proposed!r}, expected block_size - 1 = {block_size - 1}"
            )
