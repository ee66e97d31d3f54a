"""Measures drafters by decoding, one after the other, over one loaded target; obeys benchmarks/worker_process.py.

Prompts are decoded greedily in batches over caches of fixed size, first plainly, then with each drafter, whose outputs
must be those of plain decoding up to near-ties. A drafter is a checkpoint, or a directory in a published format, which
decodes a prompt for its self-test before it is measured.
"""

import argparse
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.worker_process import answer_all
from drafter_trainer.drafter_interface import Drafter
from drafter_trainer.evaluation.batch_decoder import BatchDecoder, DecodingSetting, static_length
from drafter_trainer.evaluation.decode import Decoded
from drafter_trainer.evaluation.losslessness import first_difference
from drafter_trainer.formats.opening import open_drafter
from slipstream.chat_rendering import render_chat
from slipstream.eval_prompts import Prompt, end_ids, load_prompts
from slipstream.run_spec.spec import Dtype, TargetSpec
from slipstream.target_facts import read_target_facts
from slipstream.target_loading import load_causal_lm

BLOCK_ROOM = 64
"""The longest block there is: caches of one size serve every drafter."""
GAP_BOUND = {"float32": 0.0, "bfloat16": 0.5}


class Meter:
    """The target with the prompts, ready for any drafter.

    Args:
        model: directory, hub name or .gguf of the target.
        prompts: to decode.
        args: device, dtype, max_new_tokens, batch, graphs.
    """

    def __init__(self, model: str, prompts: list[Prompt], args: argparse.Namespace) -> None:
        self._args = args
        dtype: Dtype = args.dtype
        self.target = load_causal_lm(TargetSpec(model=model, dtype=dtype), args.device)
        self._facts = read_target_facts(self.target.model, self.target.tokenizer).config
        self._attention = self.target.model.config._attn_implementation
        self._ends = end_ids(self.target)
        self._batches = list(self._batched(prompts))
        self._plain = self._decode_all(None)

    def plain(self) -> dict[str, Any]:
        """What decoding without a drafter took."""
        decoded = [one for row in self._plain for one in row]
        return {"plain_tokens_per_second": _speed(decoded)}

    def measure(self, directory: str) -> dict[str, Any]:
        """Tokens and rounds of every prompt by source, in the order of the file; how outputs compare with plain ones.

        The token that the prefill gives belongs to no round: accepted length is the sum of tokens over that of rounds.
        """
        began = time.monotonic()
        opened = open_drafter(Path(directory))
        if opened.published is not None:
            # Its self-test runs the target as transformers made it; decoders exchange the attention.
            self.target.model.set_attn_implementation(self._attention)
        config = opened.for_target(self.target, self._facts, self._ends)
        drafter = config.build()
        drafter.load_state_dict(opened.weights)
        drafter = drafter.to(self.target.model.device, self.target.model.dtype).eval()
        found = self._decode_all(drafter)
        by_source: dict[str, list[tuple[int, int, int]]] = {}
        differences = []
        for batch, plain, drafted in zip(self._batches, self._plain, found, strict=True):
            for (number, prompt, _), before, after in zip(batch, plain, drafted, strict=True):
                counts = (number, len(after.tokens) - 1, len(after.emitted_per_round))
                by_source.setdefault(prompt.source, []).append(counts)
                different = first_difference(prompt.id, before, after, GAP_BOUND[self._args.dtype])
                differences += [different] if different else []
        ordered = {source: sorted(counts) for source, counts in sorted(by_source.items())}
        return {
            "tokens": {source: [tokens for _, tokens, _ in counts] for source, counts in ordered.items()},
            "rounds": {source: [rounds for _, _, rounds in counts] for source, counts in ordered.items()},
            "tokens_per_second": _speed([one for row in found for one in row]),
            "outputs_that_differ": len(differences),
            "beyond_the_gap": sum(not difference.allowed for difference in differences),
            "seconds": time.monotonic() - began,
        }

    def _batched(self, prompts: list[Prompt]) -> Iterator[list[tuple[int, Prompt, Tensor]]]:
        """Prompts of about one length together; each with its number in the file."""
        model, tokenizer = self.target.model, self.target.tokenizer
        encoded = []
        for number, prompt in enumerate(prompts):
            text = render_chat(tokenizer, prompt.messages, as_prompt=True)
            ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], device=model.device)
            encoded.append((number, prompt, ids))
        encoded.sort(key=lambda one: len(one[2]))
        for start in range(0, len(encoded), self._args.batch):
            yield encoded[start : start + self._args.batch]

    @torch.no_grad()
    def _decode_all(self, drafter: Drafter | None) -> list[list[Decoded]]:
        found, decoder, length = [], None, 0
        for batch in self._batches:
            needed = static_length(max(len(ids) for _, _, ids in batch) + self._args.max_new_tokens + BLOCK_ROOM)
            if decoder is None or needed != length:
                rows, length = min(self._args.batch, sum(map(len, self._batches))), needed
                decoder = BatchDecoder(
                    self.target.model, drafter, DecodingSetting(rows, length, graphs=self._args.graphs)
                )
            found.append(decoder.decode([ids for _, _, ids in batch], self._args.max_new_tokens, self._ends))
        return found


def _speed(decoded: list[Decoded]) -> float:
    seconds = sum(one.decode_seconds for one in decoded)
    return sum(len(one.tokens) - 1 for one in decoded) / seconds if seconds else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--prompts-per-source", type=int, default=60)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=30)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=tuple(GAP_BOUND), default="bfloat16")
    parser.add_argument("--no-graphs", dest="graphs", action="store_false")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    meter: Meter

    def begin() -> dict[str, Any]:
        nonlocal meter
        meter = Meter(args.model, load_prompts(args.prompts, args.prompts_per_source), args)
        return meter.plain()

    return answer_all(begin, lambda command: meter.measure(command["directory"]))


if __name__ == "__main__":
    sys.exit(main())
