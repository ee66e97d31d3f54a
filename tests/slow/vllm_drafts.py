"""What a real vLLM drafts and answers: run by a Python that has vLLM (and nothing of Slipstream), see test_vllm.py.

Usage: vllm_drafts.py TARGET DRAFTER TOKENS < [[prompt token, …], …] > [{"tokens": […], "drafts": [[…], …]}, …]
"""

import json
import os
import sys
from pathlib import Path

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

from vllm import LLM, SamplingParams
from vllm.v1.spec_decode.dflash import DFlashProposer

drafts = []
propose = DFlashProposer.propose


def recorded(*arguments, **named):  # type: ignore[no-untyped-def]
    """vLLM tells how many drafts it accepted, and not which they were."""
    proposed = propose(*arguments, **named)
    drafts.append(proposed[0].tolist())
    return proposed


def main(target: str, drafter: str, num_tokens: int) -> None:
    """One prompt after the other, greedily."""
    DFlashProposer.propose = recorded
    block_size = json.loads((Path(drafter) / "config.json").read_text())["block_size"]
    llm = LLM(
        model=target,
        speculative_config={"method": "dflash", "model": drafter, "num_speculative_tokens": block_size - 1},
        dtype="float32",
        max_model_len=256,
        max_num_seqs=1,
        enforce_eager=True,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )
    answers = []
    for prompt in json.load(sys.stdin):
        drafts.clear()
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        output = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)[0].outputs[0]
        answers.append({"tokens": list(output.token_ids), "drafts": list(drafts)})
    # The last line: vLLM logs to stdout as well.
    sys.stdout.write("\n" + json.dumps(answers) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
