"""Let the target answer prompts greedily and write the conversations that a drafter is trained on.

    python tools/answer_prompts.py MODEL prompts.txt conversations.jsonl.gz

MODEL is a local directory or a .gguf file; prompts.txt holds one prompt a line. The shipped demo conversations were
made with it. Answers cut at --max-new-tokens are marked `"finished": false`: no end-of-turn token belongs there.
"""

import argparse
import gzip
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase


def load(model: str, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the target in float32, so that its greedy text is that of the float32 evaluation."""
    path = Path(model)
    if path.suffix == ".gguf":
        source, extra = str(path.parent), {"gguf_file": path.name}
    else:
        source, extra = model, {}
    tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left", **extra)
    target = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **extra)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return target.to(device).eval(), tokenizer


def end_of_turn_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that closes an assistant turn, read off the chat template."""
    turn = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    ids = tokenizer(tokenizer.apply_chat_template(turn, tokenize=False), add_special_tokens=False)["input_ids"]
    return next(i for i in reversed(ids) if i in tokenizer.all_special_ids)


@torch.inference_mode()
def answer(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], max_new_tokens: int
) -> Iterator[tuple[str, bool]]:
    """Greedy answers of one batch: text and whether the target ended its turn."""
    end = end_of_turn_id(tokenizer)
    chats = [
        tokenizer.apply_chat_template([{"role": "user", "content": p}], tokenize=False, add_generation_prompt=True)
        for p in prompts
    ]
    batch = tokenizer(chats, return_tensors="pt", padding=True, add_special_tokens=False).to(target.device)
    generated = target.generate(
        **batch, do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=end, pad_token_id=tokenizer.pad_token_id
    )
    for row in generated[:, batch["input_ids"].shape[1] :].tolist():
        finished = end in row
        ids = row[: row.index(end)] if finished else row
        yield tokenizer.decode(ids, skip_special_tokens=False), finished


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--max-new-tokens", type=int, default=192)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    target, tokenizer = load(args.model, args.device)
    prompts = [line.strip() for line in args.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    started = time.monotonic()
    with gzip.open(args.output, "wt", encoding="utf-8") as out:
        for first in range(0, len(prompts), args.batch):
            batch = prompts[first : first + args.batch]
            for i, (text, finished) in enumerate(answer(target, tokenizer, batch, args.max_new_tokens)):
                messages = [{"role": "user", "content": batch[i]}, {"role": "assistant", "content": text}]
                record = {"id": f"demo-{first + i:04d}", "finished": finished, "messages": messages}
                out.write(json.dumps(record, ensure_ascii=False) + "\n")
            done = first + len(batch)
            sys.stderr.write(f"{done}/{len(prompts)} answers, {time.monotonic() - started:.0f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
