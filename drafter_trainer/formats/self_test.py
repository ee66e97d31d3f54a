"""Do the files of a drafter decode as the drafter itself does? Shown on the target's own greedy text, block by block.

Two paths that share nothing but the target's forward pass propose the same blocks:

* ours: `DFlashDrafter` with features from hooks on the decoder layers, as in training;
* the files': `config.json` and the tensors read plainly here, the layers numbered as the format numbers them into
  transformers' `hidden_states`, and `portable_dflash`, which travels with z-lab's files.

A wrong slot or layer number gives drafts of another kind without any error; here they differ.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from jinja2.exceptions import TemplateError
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig, Qwen3Config

from drafter_trainer.drafter import DFlashDrafter
from drafter_trainer.evaluation.report import LOW_ACCEPTED_LENGTH
from drafter_trainer.formats.portable_dflash import DFlashDraftModel
from slipstream.chat_rendering import render_chat
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.target_loading import LoadedTarget, decoder_layers
from slipstream.telemetry.logs import log_event

NUM_TOKENS = 32
"""Greedy tokens walked per prompt."""
PROMPTS = (
    "Write a short story about a lighthouse keeper.",
    "What is 12 times 34? Explain each step.",
    "Write a Python function that reverses a list.",
    "Why is the sky blue?",
)
# Two logits of this distance, relative to the largest, may change places between two ways to compute them.
_NEAR_TIE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
_FORWARD_TOLERANCE = 1e-3

_log = logging.getLogger(__name__)


@dataclass
class SelfTest:
    """What the walk found; drafts are counted slot by slot."""

    prompts: int = 0
    rounds: int = 0
    accepted: int = 0
    """Accepted drafts of our path plus one bonus token a round."""
    accepted_by_files: int = 0
    """The same of the files' path, at the same places."""
    drafts: int = 0
    equal_drafts: int = 0
    near_ties: int = 0
    """Drafts that differ where the two largest logits are closer than rounding."""

    @property
    def accepted_length(self) -> float:
        """Mean tokens per round, bonus included."""
        return self.accepted / max(1, self.rounds)

    @property
    def accepted_length_of_files(self) -> float:
        """The same of the files' path."""
        return self.accepted_by_files / max(1, self.rounds)

    @property
    def passed(self) -> bool:
        """Every draft is equal, but for near-ties."""
        return self.rounds > 0 and self.equal_drafts + self.near_ties == self.drafts

    def to_dict(self) -> dict[str, Any]:
        """For the record beside the files."""
        return {
            "prompts": self.prompts,
            "rounds": self.rounds,
            "accepted_length": round(self.accepted_length, 4),
            "accepted_length_of_files": round(self.accepted_length_of_files, 4),
            "drafts": self.drafts,
            "equal_drafts": self.equal_drafts,
            "near_ties": self.near_ties,
        }


class FilesDrafter:
    """A drafter as its files describe it, read without the code of the formats."""

    def __init__(self, directory: Path, device: torch.device) -> None:
        values = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        nested = "transformer_layer_config" in values
        layers = dict(values["transformer_layer_config"] if nested else values)
        dflash = values.get("dflash_config", {})
        if nested:
            self.hidden_state_indices = tuple(values["aux_hidden_state_layer_ids"])
            mask = values["mask_token_id"]
        else:
            self.hidden_state_indices = tuple(layer + 1 for layer in dflash["target_layer_ids"])
            mask = dflash["mask_token_id"]
        layers |= {
            "block_size": values.get("block_size", dflash.get("block_size")),
            "dflash_config": {"target_layer_ids": list(self.hidden_state_indices), "mask_token_id": mask},
        }
        self.from_anchor = bool(values.get("sample_from_anchor", False))
        self.model = DFlashDraftModel(Qwen3Config(**layers)).float().eval().to(device)
        self.model.load_state_dict(_tensors(directory))

    @torch.inference_mode()
    def hidden(self, embeddings: Tensor, features: Tensor) -> Tensor:
        """Of the slots that propose: [B - 1, D] (all B where the anchor's slot proposes too)."""
        positions = torch.arange(len(features) + len(embeddings), device=features.device)
        hidden = self.model(embeddings[None], features[None], positions[None])[0]
        return hidden if self.from_anchor else hidden[1:]

    def block(self, last_token: int) -> Tensor:
        """Int [B]: the last accepted token, then MASK."""
        block = torch.full((self.model.block_size,), self.model.mask_token_id, device=self.model.device)
        block[0] = last_token
        return block


def _tensors(directory: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= safetensors.torch.load_file(file)
    copies = ("embed_tokens.weight", "lm_head.weight")
    return {name: tensor.float() for name, tensor in tensors.items() if name not in copies}


@dataclass(frozen=True)
class _Text:
    """A prompt and the target's greedy answer, with both readings of the features; float32."""

    token_ids: list[int]
    prompt_length: int
    by_hook: Tensor
    """[L, n·D]"""
    by_index: Tensor
    """[L, n·D]; another width where the files name another number of layers."""


class TargetReader:
    """The target's part of the test: greedy text, features, embedding, head."""

    def __init__(self, target: LoadedTarget, embedding_scale: float, end_ids: frozenset[int]) -> None:
        self.target, self.scale, self.end_ids = target, embedding_scale, end_ids
        self.device = target.model.device
        self._embedding = target.model.get_input_embeddings().weight
        self._head = target.model.get_output_embeddings().weight
        self.near_tie = _NEAR_TIE[self._head.dtype]

    def embed(self, token_ids: Tensor) -> Tensor:
        """[B] → float32 [B, D]."""
        return functional.embedding(token_ids, self._embedding).float() * self.scale

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, D] → float32 [N, V], without a soft cap, which changes no order."""
        return (hidden.to(self._head.dtype) @ self._head.t()).float()

    @torch.inference_mode()
    def read(self, prompt_ids: Tensor, layer_ids: Sequence[int], indices: Sequence[int], num_tokens: int) -> _Text:
        """Decode greedily, then read the whole text once.

        Args:
            prompt_ids: int [P].
            layer_ids: zero-based decoder layers, whose outputs hooks capture.
            indices: of `hidden_states`, where 0 is what enters layer 0.
            num_tokens: to decode.
        """
        model = self.target.model
        ends = sorted(self.end_ids) or None
        greedy = GenerationConfig(
            max_new_tokens=num_tokens,
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            eos_token_id=ends,
            pad_token_id=ends[0] if ends else 0,
        )
        text = model.generate(prompt_ids[None], attention_mask=torch.ones_like(prompt_ids)[None],
                              generation_config=greedy)  # fmt: skip
        left: dict[int, Tensor] = {}

        def hook(number: int) -> Any:
            def keep(_module: Any, _inputs: Any, output: Any) -> None:
                left[number] = output if isinstance(output, Tensor) else output[0]

            return keep

        layers = decoder_layers(model)
        last = len(layers) - 1
        hooks = [layers[number].register_forward_hook(hook(number)) for number in {*layer_ids, last}]
        try:
            states = model(input_ids=text, use_cache=False, output_hidden_states=True, logits_to_keep=1).hidden_states
        finally:
            for one in hooks:
                one.remove()
        # The last entry lies behind the final norm; engines number what lies before it.
        indexed = [left[last] if index == last + 1 else states[index] for index in indices]
        return _Text(
            text[0].tolist(),
            len(prompt_ids),
            torch.cat([left[number][0] for number in layer_ids], dim=-1).float(),
            torch.cat([state[0] for state in indexed], dim=-1).float(),
        )


def run_self_test(
    reader: TargetReader, drafter: DFlashDrafter, directory: Path, prompts: Sequence[str] = PROMPTS
) -> SelfTest:
    """Walk greedy texts of the target with the drafter and with the files in `directory`.

    Args:
        reader: of the drafter's target.
        drafter: what the files must be like; it is moved to the target's device, in float32.
        directory: with config.json and tensors.
        prompts: one user message each.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID, the files draft something else.
    """
    files = FilesDrafter(directory, reader.device)
    ours = drafter.float().eval().to(reader.device)
    top = len(decoder_layers(reader.target.model))
    if max(files.hidden_state_indices) > top:
        raise _failed(f"the files read the output of layer {max(files.hidden_state_indices) - 1}, the target has {top}")
    result = SelfTest()
    for number, prompt in enumerate(prompts, start=1):
        log_event(_log, "info", "self_test_decodes", prompt=f"{number}/{len(prompts)}", tokens=NUM_TOKENS)
        ids = torch.tensor(_prompt_ids(reader.target, prompt), device=reader.device)
        text = reader.read(ids, drafter.config.target_layer_ids, files.hidden_state_indices, NUM_TOKENS)
        _walk(reader, ours, files, text, result)
    if not result.passed:
        raise _failed(
            f"{result.drafts - result.equal_drafts - result.near_ties} of {result.drafts} drafted tokens differ; "
            f"accepted length {result.accepted_length_of_files:.3f}, expected {result.accepted_length:.3f}"
        )
    log_event(_log, "info", "self_test_passed", **result.to_dict())
    if result.accepted_length < LOW_ACCEPTED_LENGTH:
        log_event(
            _log, "warning", "accepted_length_is_low", accepted_length=round(result.accepted_length, 3),
            detail="hardly trained, trained for another target, or on answers that are not this one's own",
        )  # fmt: skip
    return result


@torch.inference_mode()
def _walk(reader: TargetReader, ours: DFlashDrafter, files: FilesDrafter, text: _Text, result: SelfTest) -> None:
    """As decoding does: from the first token of the answer on, each round ends behind what it accepted."""
    if text.by_hook.shape != text.by_index.shape:
        width = text.by_hook.shape[1]
        raise _failed(f"the files read {text.by_index.shape[1]} feature values per token, expected {width}")
    result.prompts += 1
    place = text.prompt_length
    while place < len(text.token_ids) - 1:
        mine = reader.logits(our_hidden(ours, reader.embed(_our_block(ours, text, place)), text.by_hook[:place]))
        theirs = reader.logits(
            files.hidden(reader.embed(files.block(text.token_ids[place])), text.by_index[:place].contiguous())
        )
        following = text.token_ids[place + 1 :]
        accepted = _matching(mine.argmax(-1).tolist(), following)
        result.rounds += 1
        result.accepted += accepted + 1
        result.accepted_by_files += _matching(theirs.argmax(-1).tolist(), following) + 1
        _count(mine, theirs, reader.near_tie, result)
        place += accepted + 1


def _our_block(drafter: DFlashDrafter, text: _Text, place: int) -> Tensor:
    block = torch.full((drafter.config.block_size,), drafter.config.mask_token_id, device=text.by_hook.device)
    block[0] = text.token_ids[place]
    return block


def our_hidden(drafter: DFlashDrafter, embeddings: Tensor, features: Tensor) -> Tensor:
    """Hidden states of slots 1 … B - 1 of one block behind all of `features` [S, n·D] → [B - 1, D]."""
    length, size = len(features), len(embeddings)
    context = drafter.project_context(features, torch.arange(length, device=features.device))
    positions = torch.arange(length, length + size, device=features.device)
    return drafter.draft(embeddings, positions, context)[1:]


def _matching(drafts: Sequence[int], following: Sequence[int]) -> int:
    matched = 0
    while matched < min(len(drafts), len(following)) and drafts[matched] == following[matched]:
        matched += 1
    return matched


def _count(mine: Tensor, theirs: Tensor, near_tie: float, result: SelfTest) -> None:
    result.drafts += max(len(mine), len(theirs))
    if len(mine) != len(theirs):
        return
    best, chosen = mine.max(dim=-1), theirs.argmax(dim=-1)
    equal = best.indices == chosen
    gap = best.values - mine.gather(-1, chosen[:, None])[:, 0]
    near = ~equal & (gap <= near_tie * mine.abs().max())
    result.equal_drafts += int(equal.sum())
    result.near_ties += int(near.sum())


def _prompt_ids(target: LoadedTarget, prompt: str) -> list[int]:
    try:
        rendered = render_chat(target.tokenizer, [{"role": "user", "content": prompt}], as_prompt=True)
    except (TemplateError, TypeError, ValueError) as error:
        raise SlipstreamError(
            f"the target's chat template refuses a plain question: {error}",
            reason=Reason.MODEL_INVALID,
            remedy="Mend the template, or leave the self-test out with --without-self-test.",
        ) from error
    ids: list[int] = target.tokenizer(rendered, add_special_tokens=False)["input_ids"]
    return ids


def compare_forward(directory: Path, drafter: DFlashDrafter, *, seed: int = 0) -> float:
    """The same comparison where no target is at hand, on drawn features; returns the largest relative difference.

    It finds a wrong slot, position or tensor, but no layer number.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID.
    """
    config = drafter.config
    files = FilesDrafter(directory, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(3 * config.block_size, config.num_features * config.hidden_size, generator=generator)
    embeddings = torch.randn(files.model.block_size, config.hidden_size, generator=generator)
    with torch.inference_mode():
        mine = our_hidden(drafter.float().eval(), embeddings[: config.block_size], features)
        theirs = files.hidden(embeddings, features)
    if mine.shape != theirs.shape:
        raise _failed(f"the files propose {len(theirs)} tokens a round, expected {len(mine)}")
    difference = ((mine - theirs).abs().max() / mine.abs().max()).item()
    if not difference <= _FORWARD_TOLERANCE:
        raise _failed(f"hidden states differ by {difference:.2g} of the largest, expected at most {_FORWARD_TOLERANCE}")
    return difference


def _failed(what: str) -> SlipstreamError:
    return SlipstreamError(
        f"the self-test failed, these files do not decode as the drafter does: {what}",
        reason=Reason.CHECKPOINT_INVALID,
        remedy="Do not serve them. If config.json was not edited this is a defect: please report it with both lines.",
    )
