"""The target's greedy answers on which a drafter is measured while it trains: a file of token rows, checked.

A line is what `slipstream data regenerate RECIPE --heldout` writes: `input_ids` and `loss_mask` of a prompt and its
answer, the prompt's `source`, and `target_fingerprint`, whose greedy text it is. The trainer measures on what is read
here, `slipstream plan` foretells what that costs. No torch here.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, ValidationError

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason

_MAKE_IT = "Make it with `slipstream data regenerate RECIPE --heldout`, or remove eval.heldout from the recipe."
_MAKE_ANEW = "Delete it and make it anew with `slipstream data regenerate RECIPE --heldout`."


class _Line(BaseModel):
    """What is read of a line; the rest is for people."""

    source: Annotated[str, Field(min_length=1)]
    target_fingerprint: Annotated[str, Field(min_length=1)]
    input_ids: list[Annotated[int, Field(ge=0, lt=2**31)]]
    loss_mask: list[Literal[0, 1]]


@dataclass(frozen=True)
class HeldoutRow:
    """A prompt with its answer."""

    source: str
    token_ids: tuple[int, ...]
    answer_start: int
    """Where the answer begins: the token that a prefill gives."""

    @property
    def num_drafted(self) -> int:
        """Tokens of the answer that rounds of decoding emit: all but the first."""
        return len(self.token_ids) - self.answer_start - 1


@dataclass(frozen=True)
class HeldoutRows:
    """All rows of a file, in its order."""

    rows: tuple[HeldoutRow, ...]
    digest: str
    """Names the set: estimates on different sets do not compare."""

    @property
    def sources(self) -> tuple[str, ...]:
        """In the order of their first rows."""
        return tuple(dict.fromkeys(row.source for row in self.rows))


def load_rows(path: Path, *, target_fingerprint: str, pack_tokens: int) -> HeldoutRows:
    """Read and check a file.

    Args:
        path: `eval.heldout`.
        target_fingerprint: of the target that the run trains for.
        pack_tokens: `data.pack_tokens`; no row may be longer.

    Raises:
        SlipstreamError: DATA_INVALID, it is missing, empty, damaged, too long for a pack, or has a source of which
            every answer is a single token; TARGET_FINGERPRINT_MISMATCH, another target gave the answers.
    """
    found, fingerprints = read_rows(path, pack_tokens)
    if fingerprints != {target_fingerprint}:
        others = sorted(fingerprints - {target_fingerprint})
        raise SlipstreamError(
            f"eval.heldout: the answers in {path} are of the target with fingerprint {others[0]}, the run's target has "
            f"{target_fingerprint}.",
            reason=Reason.TARGET_FINGERPRINT_MISMATCH,
            remedy=f"A drafter is measured on its own target's greedy text. {_MAKE_ANEW} The recipe has to name the "
            "target.model and the target.dtype that the target server was started with: a fingerprint is of both.",
        )
    return found


def read_rows(path: Path, pack_tokens: int) -> tuple[HeldoutRows, set[str]]:
    """The same where the run's target is not known: the rows, and the fingerprints of the targets they are of.

    Raises:
        SlipstreamError: DATA_INVALID, see `load_rows`.
    """
    rows, fingerprints = [], set()
    digest = hashlib.sha256()
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    row, fingerprint = _parse(line, f"{path}:{number}")
                    rows.append(row)
                    fingerprints.add(fingerprint)
                    digest.update(json.dumps([row.source, row.answer_start, row.token_ids]).encode())
    except FileNotFoundError as error:
        raise _invalid(f"eval.heldout names {path}, which does not exist on the trainer's machine", _MAKE_IT) from error
    except (OSError, UnicodeDecodeError) as error:
        raise _invalid(f"eval.heldout: {path} cannot be read: {error}", _MAKE_ANEW) from error
    found = HeldoutRows(tuple(rows), digest.hexdigest()[:16])
    _check_usable(found, path, pack_tokens)
    return found, fingerprints


def _check_usable(found: HeldoutRows, path: Path, pack_tokens: int) -> None:
    if not found.rows:
        raise _invalid(f"eval.heldout: {path} holds no prompts", _MAKE_ANEW)
    longest = max(len(row.token_ids) for row in found.rows)
    if longest > pack_tokens:
        raise _invalid(
            f"eval.heldout: a row of {path} has {longest} tokens, a pack has data.pack_tokens = {pack_tokens}",
            "Lower eval.max_new_tokens or shorten the prompts and make the file anew, or raise data.pack_tokens.",
        )
    for source in found.sources:
        if not any(row.num_drafted for row in found.rows if row.source == source):
            raise _invalid(
                f"eval.heldout: no answer of source {source!r} in {path} has a second token: nothing is drafted",
                "Take these prompts out, or raise eval.max_new_tokens, and make the file anew.",
            )


def _parse(line: str, where: str) -> tuple[HeldoutRow, str]:
    try:
        record = _Line.model_validate_json(line, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"])) or "the line"
        raise _invalid(
            f"{where} is no held-out answer: {f'{key}: ' if key else ''}{first['msg']}", _MAKE_ANEW
        ) from error
    ids, mask = record.input_ids, record.loss_mask
    start = mask.index(1) if 1 in mask else 0
    if len(ids) != len(mask) or start == 0 or mask != [0] * start + [1] * (len(mask) - start):
        raise _invalid(f"{where}: loss_mask must be 0 on a prompt and 1 on the one answer after it", _MAKE_ANEW)
    return HeldoutRow(record.source, tuple(ids), start), record.target_fingerprint


def _invalid(message: str, remedy: str) -> SlipstreamError:
    return SlipstreamError(f"{message}.", reason=Reason.DATA_INVALID, remedy=remedy)
