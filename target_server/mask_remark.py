"""Will a run find a mask token? Asked with the tokenizer alone; the trainer asks again with the model itself."""

from typing import TYPE_CHECKING

from slipstream.errors import SlipstreamError
from slipstream.mask_token import MaskFactsOfFiles, mask_row
from slipstream.run_spec.spec import DrafterSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def mask_remark(drafter: DrafterSpec, tokenizer: "PreTrainedTokenizerBase", rows: int | None) -> str | None:
    """What is wrong with the run's mask token, with the remedy; None where nothing is known to be.

    Args:
        drafter: of the recipe.
        tokenizer: the target's.
        rows: of the model's vocabulary; None: not known.
    """
    known = len(tokenizer) if rows is None else rows
    if rows is None and drafter.mask_token_id is not None:
        known = max(known, drafter.mask_token_id + 1)  # who names a row may know of more
    special = {token.content: row for row, token in tokenizer.added_tokens_decoder.items()}
    try:
        mask_row(drafter, MaskFactsOfFiles(known, len(tokenizer), special, tokenizer.mask_token_id))
    except SlipstreamError as error:
        open_question = rows is None and drafter.mask_token is None
        unless = "unless the model's vocabulary has a row to spare, " if open_question else ""
        return f"{unless}a run fails: {error.message} {error.remedy}"
    return None
