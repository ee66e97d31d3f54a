"""Will a run find a mask token? Asked with the tokenizer alone; the trainer asks again with the model itself."""

from typing import TYPE_CHECKING

from slipstream.run_spec.spec import DrafterSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SHOWN = 8


def mask_remark(drafter: DrafterSpec, tokenizer: "PreTrainedTokenizerBase", rows: int | None) -> str | None:
    """What is wrong with the run's mask token, with the remedy; None where nothing is known to be.

    Args:
        drafter: of the recipe.
        tokenizer: the target's.
        rows: of the model's vocabulary; None: not known.
    """
    special = [token.content for token in tokenizer.added_tokens_decoder.values()]
    has = ", ".join(special[:_SHOWN]) or "none"
    remedy = f"set drafter.mask_token to a special token that no answer contains (it has: {has})"
    if drafter.mask_token is not None and drafter.mask_token not in special:
        return (
            f"drafter.mask_token {drafter.mask_token!r} is no special token of the tokenizer, so a run fails: {remedy}"
        )
    if (drafter.mask_token_id, drafter.mask_token, tokenizer.mask_token_id) != (None, None, None):
        return None
    if rows is None:
        spare = "unless the model's vocabulary has a row to spare, "
    elif rows > len(tokenizer):
        return None
    else:
        spare = ""
    return f"the recipe names no mask token and the tokenizer has none; {spare}a run fails: {remedy}"
