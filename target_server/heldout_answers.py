"""The target answers the prompts that drafters are measured with: greedily, and as `slipstream eval` would decode them.

The same prompts of every source, rendered alike, ended by the same tokens and after as many; the rows are what
`eval.heldout` names.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError

from slipstream.chat_rendering import render_chat
from slipstream.errors import SlipstreamError
from slipstream.eval_prompts import Prompt, end_ids, load_prompts
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import EvalSpec
from slipstream.target_loading import LoadedTarget
from slipstream.wire.data_report import DataReport, ReportBuilder
from target_server.regeneration import Asked, Regenerator, Sampling, answer_prompts


def prompts_of(evaluation: EvalSpec) -> list[Prompt]:
    """What a recipe's `[eval]` names.

    Raises:
        SlipstreamError: SPEC_INVALID, it names none; DATA_INVALID, the file is missing or holds none.
    """
    if evaluation.prompts is None:
        raise SlipstreamError(
            "There are no prompts to answer: the recipe has no eval.prompts.",
            reason=Reason.SPEC_INVALID,
            remedy="Name a JSONL file of prompts in [eval] of the recipe, or with --set eval.prompts=FILE.",
        )
    return load_prompts(Path(evaluation.prompts), evaluation.num_prompts)


def answer_heldout(
    target: LoadedTarget, prompts: Sequence[Prompt], output: Path, *, sampling: Sampling, settings: dict[str, Any]
) -> DataReport:
    """Write the target's greedy answers to `output`; goes on where an earlier call was killed.

    Args:
        target: loaded.
        prompts: at least one.
        output: JSONL; `OUTPUT.settings.json` lies beside it.
        sampling: greedy.
        settings: `target` and `target_fingerprint`; recorded with the rest that decides the answers.

    Raises:
        SlipstreamError: DATA_INVALID for a prompt that the target cannot take, or an output that was begun with other
            settings; OUT_OF_MEMORY; DISK_FULL.
    """
    assert sampling.temperature == 0.0
    regenerator = Regenerator(target, sampling, end_ids(target))
    # Before the first is answered: what is wrong with one of them is said at once.
    asked = [Asked(prompt.id, _tokens(regenerator, target, prompt), prompt.source) for prompt in prompts]
    read = hashlib.sha256(json.dumps([[one.source, one.token_ids] for one in asked]).encode()).hexdigest()
    report = ReportBuilder()
    report.read = len(asked)
    settings = {**asdict(sampling), **settings, "prompts": read}
    answer_prompts(regenerator, iter(asked), output, settings, report, len(asked))
    return report.build("train")


def _tokens(regenerator: Regenerator, target: LoadedTarget, prompt: Prompt) -> list[int]:
    try:
        text = render_chat(target.tokenizer, prompt.messages, as_prompt=True)
    except (TemplateError, TypeError, ValueError) as error:
        raise _refused(prompt, f"the target's chat template refuses it: {error}") from error
    ids: list[int] = target.tokenizer(text, add_special_tokens=False)["input_ids"]
    if not 0 < len(ids) <= regenerator.max_prompt_tokens:
        most = f"at most {regenerator.max_prompt_tokens} leave room for the answer"
        raise _refused(prompt, f"it has {len(ids)} tokens, {most}")
    return ids


def _refused(prompt: Prompt, why: str) -> SlipstreamError:
    return SlipstreamError(
        f"Prompt {prompt.id} of eval.prompts cannot be answered: {why}.",
        reason=Reason.DATA_INVALID,
        remedy="Change the prompt, lower eval.max_new_tokens, or take it out of the file.",
    )
