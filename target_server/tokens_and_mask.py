"""② A conversation becomes token ids and an exact loss mask.

The rendered text is tokenized once, with offsets; the mask follows from characters, never from searching for tokens.
A token is supervised iff it holds a character of an answer (its content or its end-of-turn token) and no character
of the prompt that the model was given. So a token that joins white space written by the template with the first
word of an answer counts (the model has to produce it), and one that joins the prompt's end with it does not.
"""

import copy
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.target_loading import known_tokens
from slipstream.wire.data_report import Finding, ReportBuilder
from target_server.chat_template import ChatTemplate, RenderedConversation, Row, comparable
from target_server.conversations import Conversation, TokenRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TrainTurns = Literal["all", "last"]

_BATCH_CONVERSATIONS = 256
_BATCH_CHARACTERS = 4 * 2**20


@dataclass(frozen=True)
class Document:
    """One row of tokens of one conversation."""

    id: str
    """The conversation's id; with `#turn` appended where it is one of several rows."""
    token_ids: npt.NDArray[np.int32]
    """[L]"""
    loss_mask: npt.NDArray[np.uint8]
    """[L], 1 on supervised tokens."""


class ChatEncoder:
    """Conversations in, documents of at most `max_tokens` tokens out."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", max_tokens: int, *, train_turns: TrainTurns = "all"
    ) -> None:
        """
        Args:
            tokenizer: the target's.
            max_tokens: documents are cut there.
            train_turns: which of the answers that may be trained are.

        Raises:
            SlipstreamError: MODEL_INVALID for a tokenizer without offsets or without a usable template.
        """
        if not tokenizer.is_fast:
            raise SlipstreamError(
                f"The tokenizer ({type(tokenizer).__name__}) reports no character offsets, which exact masks need.",
                reason=Reason.MODEL_INVALID,
                remedy="Put a tokenizer.json (fast tokenizer) into the model's directory.",
            )
        assert max_tokens > 0
        self.max_tokens = max_tokens
        self.template = ChatTemplate(tokenizer)
        self._only_last = train_turns == "last"
        self._vocabulary = known_tokens(tokenizer)
        self._special = _special_tokens(tokenizer)
        # A private copy: post-processors would trim white space off the offsets, and the Rust object refuses to be
        # used from two threads at once.
        self._tokenizer: Any = copy.deepcopy(tokenizer)
        self._tokenizer.backend_tokenizer.post_processor = None

    def encode(
        self, conversations: Iterable[Conversation | TokenRow], report: ReportBuilder
    ) -> Iterator[tuple[Conversation | TokenRow, list[Document]]]:
        """Yield every conversation that gives documents, in order, with its documents (one, or one per answer).

        Conversations are tokenized in batches. `report` gets what was used, cut, skipped and dropped.
        """
        for batch in _batches(conversations):
            rendered = [
                self.template.render(each, only_last=self._only_last) if isinstance(each, Conversation) else None
                for each in batch
            ]
            encoded = iter(self._tokenize([row for each in rendered if each is not None for row in each.rows]))
            for conversation, each in zip(batch, rendered, strict=True):
                if isinstance(conversation, TokenRow):
                    documents = self._given_document(conversation, report)
                else:
                    assert each is not None
                    documents = self._documents(conversation, each, list(islice(encoded, len(each.rows))), report)
                if documents:
                    yield conversation, documents

    def _tokenize(self, rows: Sequence[Row]) -> list[tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]]:
        """Token ids and loss mask of every row, uncut."""
        if not rows:
            return []
        batch = self._tokenizer(
            [row.text for row in rows],
            add_special_tokens=False,  # the template writes them
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        result = []
        for row, ids, offsets in zip(rows, batch["input_ids"], batch["offset_mapping"], strict=True):
            bounds = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
            result.append((np.asarray(ids, dtype=np.int32), _loss_mask(row, bounds[:, 0], bounds[:, 1])))
        return result

    def _given_document(self, row: TokenRow, report: ReportBuilder) -> list[Document]:
        """A document from tokens that were made elsewhere: only cut."""
        if int(row.token_ids.max()) >= self._vocabulary:
            report.drop(Finding.TOKEN_UNKNOWN, row.where)
            return []
        document = Document(row.id, row.token_ids[: self.max_tokens], row.loss_mask[: self.max_tokens])
        if not document.loss_mask.any():
            report.drop(Finding.ANSWERS_CUT_AWAY if row.loss_mask.any() else Finding.NOTHING_TRAINED, row.where)
            return []
        _count([document], report)
        if len(row.token_ids) > self.max_tokens:
            report.note(Finding.TRUNCATED, row.where)
        return [document]

    def _documents(
        self,
        conversation: Conversation,
        rendered: RenderedConversation,
        encoded: Sequence[tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]],
        report: ReportBuilder,
    ) -> list[Document]:
        """Cut the rows of a conversation, leave out those without supervised tokens, and account for it."""
        documents, truncated, problem = [], False, None
        for row, (ids, mask) in zip(rendered.rows, encoded, strict=True):
            truncated |= len(ids) > self.max_tokens
            problem = problem or self.row_problem(row, ids, mask)
            ids, mask = ids[: self.max_tokens], mask[: self.max_tokens]
            if mask.any():
                name = conversation.id if len(rendered.rows) == 1 else f"{conversation.id}#{row.answers[0].turn}"
                documents.append(Document(name, ids, mask))
        if not documents:
            report.drop(rendered.problem if not encoded and rendered.problem else Finding.ANSWERS_CUT_AWAY,
                        conversation.where)  # fmt: skip
            return []
        _count(documents, report)
        report.mask_samples += 1
        for finding, holds in (
            (Finding.TRUNCATED, truncated),
            (Finding.ANSWER_SKIPPED, rendered.problem is not None),
            (Finding.ONE_ROW_PER_ANSWER, len(rendered.rows) > 1),
            (Finding.REASONING_NOT_WRITTEN, rendered.without_reasoning),
            (Finding.MASK_NOT_VERIFIED, problem is not None),
            (Finding.SPECIAL_TOKEN_IN_ANSWER, self._answers_hold_special_tokens(conversation)),
        ):
            if holds:
                report.note(finding, conversation.where)
        return documents

    def _answers_hold_special_tokens(self, conversation: Conversation) -> bool:
        """In the data's own text; what the template writes around it belongs there."""
        answers = (turn for turn in conversation.turns if turn.role == "assistant")
        return any(self._special.search(turn.content) or self._special.search(turn.reasoning) for turn in answers)

    def row_problem(self, row: Row, ids: npt.NDArray[np.int32], mask: npt.NDArray[np.uint8]) -> str | None:
        """Decode the supervised tokens of a row again and compare them with its answers.

        Returns None if they agree, else what differs. Unicode is compared in NFC, since tokenizers may normalise;
        white space at the ends may belong to the template; of an answer that is cut, what is left must agree.
        """
        cut = len(ids) > self.max_tokens
        runs = _supervised_runs(ids[: self.max_tokens], mask[: self.max_tokens])
        if len(runs) > len(row.answers) or (len(runs) < len(row.answers) and not cut):
            return f"{len(runs)} supervised runs for {len(row.answers)} answers"
        decode = self._tokenizer.backend_tokenizer.decode
        for index, (answer, run) in enumerate(zip(row.answers, runs, strict=False)):
            decoded = decode(run.tolist(), skip_special_tokens=False)
            if not _agrees(comparable(decoded), comparable(answer.text), cut=cut and index == len(runs) - 1):
                return f"turn {answer.turn}: the supervised tokens say {decoded[-80:]!r}"
        return None


def _special_tokens(tokenizer: "PreTrainedTokenizerBase") -> re.Pattern[str]:
    """Finds the special tokens of a tokenizer in a text. Tags such as <think>, which are added but not special, may be
    written by a model and are left alone."""
    added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    names = sorted({*added, *tokenizer.all_special_tokens} - {""}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names)) or r"(?!)")


def _batches(conversations: Iterable[Conversation | TokenRow]) -> Iterator[list[Conversation | TokenRow]]:
    """Full enough for the tokenizer's threads, small enough for memory where conversations are long."""
    batch: list[Conversation | TokenRow] = []
    characters = 0
    for conversation in conversations:
        batch.append(conversation)
        if isinstance(conversation, Conversation):
            characters += sum(len(turn.content) + len(turn.reasoning) for turn in conversation.turns)
        if len(batch) >= _BATCH_CONVERSATIONS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _count(documents: Sequence[Document], report: ReportBuilder) -> None:
    report.used += 1
    report.documents += len(documents)
    report.tokens += sum(len(document.token_ids) for document in documents)
    report.supervised_tokens += sum(int(document.loss_mask.sum()) for document in documents)


def _loss_mask(row: Row, starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """[L] mask from the tokens' character spans [starts, ends); the rule is in the module's docstring."""
    mask = np.zeros(len(starts), dtype=np.uint8)
    for answer in row.answers:
        mask |= (starts >= answer.prompt_end) & (ends > answer.start) & (starts < answer.end)
    return mask


def _supervised_runs(ids: npt.NDArray[np.int32], mask: npt.NDArray[np.uint8]) -> list[npt.NDArray[np.int32]]:
    """The maximal runs of supervised tokens."""
    edges = np.flatnonzero(np.diff(mask, prepend=0, append=0))
    return [ids[begin:end] for begin, end in zip(edges[::2], edges[1::2], strict=True)]


def _agrees(decoded: str, wanted: str, *, cut: bool) -> bool:
    """Equal, or with `cut` a beginning of it; a cut inside a character decodes to replacement characters."""
    if not cut:
        return decoded == wanted
    return wanted.startswith((decoded, decoded.rstrip("\ufffd")))
