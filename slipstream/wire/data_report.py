"""What became of every conversation of a data set: used, cut, set aside or dropped, with file:line examples."""

from collections import Counter
from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from slipstream.counted import counted

MAX_EXAMPLES = 5
_LONGEST_EXAMPLE = 255


class Finding(StrEnum):
    """Something a user should know about a conversation. The value travels on the wire; never rename one."""

    # The record gave no conversation.
    BROKEN_JSON = "broken_json"
    NOT_UTF8 = "not_utf8"
    LINE_TOO_LONG = "line_too_long"
    DAMAGED_GZIP = "damaged_gzip"
    DAMAGED_FILE = "damaged_file"
    NOT_AN_OBJECT = "not_an_object"
    NO_TURNS = "no_turns"
    EMPTY_TURN = "empty_turn"
    UNKNOWN_ROLE = "unknown_role"
    UNSUPPORTED_CONTENT = "unsupported_content"
    NO_ASSISTANT_TURN = "no_assistant_turn"
    TOKENS_INVALID = "tokens_invalid"
    # The conversation gave no tokens to learn from.
    NOTHING_TRAINED = "nothing_trained"
    TOKEN_UNKNOWN = "token_unknown"
    TOOLS_NOT_WRITTEN = "tools_not_written"
    TEMPLATE_REFUSED = "template_refused"
    ANSWER_FIRST = "answer_first"
    ANSWER_REWRITTEN = "answer_rewritten"
    ANSWERS_CUT_AWAY = "answers_cut_away"
    # The conversation was used, but not as it stands.
    TRUNCATED = "truncated"
    ANSWER_SKIPPED = "answer_skipped"
    ONE_ROW_PER_ANSWER = "one_row_per_answer"
    MASK_NOT_VERIFIED = "mask_not_verified"
    REASONING_NOT_WRITTEN = "reasoning_not_written"
    DUPLICATE_ID = "duplicate_id"
    ROLES_OUT_OF_ORDER = "roles_out_of_order"
    OTHER_LAYOUT = "other_layout"
    SPECIAL_TOKEN_IN_ANSWER = "special_token_in_answer"
    # About a file.
    FILE_GAVE_NOTHING = "file_gave_nothing"
    EMPTY_FILE = "empty_file"
    WRONG_SUFFIX = "wrong_suffix"
    BYTE_ORDER_MARK = "byte_order_mark"
    CRLF_LINES = "crlf_lines"

    @property
    def words(self) -> str:
        """For people."""
        return _WORDS[self]


_WORDS = {
    Finding.BROKEN_JSON: "the line is not valid JSON",
    Finding.NOT_UTF8: "the text is not valid UTF-8",
    Finding.LINE_TOO_LONG: "the line is longer than 64 MiB",
    Finding.DAMAGED_GZIP: "the gzip data is damaged or cut off here; the rest of the file is lost",
    Finding.DAMAGED_FILE: "the file is damaged or cut off here; the rest of it is lost",
    Finding.NOT_AN_OBJECT: "the line is not a JSON object",
    Finding.NO_TURNS: "none of the known layouts: no non-empty `messages`, `conversations`, `prompt` and `completion`, "
    "or `input_ids`",
    Finding.EMPTY_TURN: "a turn has no text",
    Finding.UNKNOWN_ROLE: "a turn has a role other than system, developer, user, assistant or tool",
    Finding.UNSUPPORTED_CONTENT: "a turn holds parts other than text, or a tool call without a name",
    Finding.NO_ASSISTANT_TURN: "no turn of the assistant",
    Finding.TOKENS_INVALID: "token ids and mask are not two lists of integers of one length, the mask of 0 and 1",
    Finding.NOTHING_TRAINED: "every answer is marked as not to be trained",
    Finding.TOKEN_UNKNOWN: "a token id is not in the target's vocabulary",
    Finding.TOOLS_NOT_WRITTEN: "it uses tools, and the chat template writes no tool calls or results",
    Finding.TEMPLATE_REFUSED: "the chat template refuses the conversation",
    Finding.ANSWER_FIRST: "every answer comes before any question",
    Finding.ANSWER_REWRITTEN: "the chat template changes the answer or the prompt before it",
    Finding.ANSWERS_CUT_AWAY: "no token of an answer is left after the cut to the token limit",
    Finding.TRUNCATED: "cut to the token limit",
    Finding.ANSWER_SKIPPED: "used, but one of its answers is context only (first turn, or changed by the template)",
    Finding.ONE_ROW_PER_ANSWER: "one row per answer, because the template renders earlier turns differently later",
    Finding.MASK_NOT_VERIFIED: "used, but the supervised tokens do not decode to the answer exactly",
    Finding.REASONING_NOT_WRITTEN: "used without its reasoning, which the chat template does not write",
    Finding.DUPLICATE_ID: "used, but an earlier conversation has the same id",
    Finding.ROLES_OUT_OF_ORDER: "used as it stands, but its roles do not alternate, or a system turn is not the first",
    Finding.OTHER_LAYOUT: "used, but its layout is another than that of the file's first record",
    Finding.SPECIAL_TOKEN_IN_ANSWER: "used, but the text of an answer holds a special token of the tokenizer, which "
    "is read as that token, not as text",
    Finding.FILE_GAVE_NOTHING: "no usable conversation in the whole file",
    Finding.EMPTY_FILE: "the file is empty, nothing was read",
    Finding.WRONG_SUFFIX: "the suffix does not say what the file holds; it was read by its content",
    Finding.BYTE_ORDER_MARK: "the file begins with a byte order mark, which was skipped",
    Finding.CRLF_LINES: "lines end with CR LF, which was read as one line end",
}


class FindingCount(BaseModel):
    """How many conversations a finding holds for, and where the first few of them are."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    finding: Finding
    count: int
    examples: tuple[str, ...]
    """The first ones, as `file.jsonl:17`."""

    def in_words(self) -> str:
        """One line for a person, e.g. `3 dropped: …` without the verb."""
        more = ", …" if self.count > len(self.examples) else ""
        return f"{self.count}: {self.finding.words} ({', '.join(self.examples)}{more})"


class DataReport(BaseModel):
    """The account of one load: `read = used + other_split + sum(dropped)`, in conversations."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    split: Literal["train", "heldout"]
    read: int
    """Records: lines that are not blank, array elements, rows (and one for a file that breaks off)."""
    used: int
    """Conversations that gave at least one document."""
    other_split: int
    """Conversations that belong to the other split; not tokenized."""
    dropped: tuple[FindingCount, ...]
    """Conversations that gave nothing, each under exactly one finding."""
    notes: tuple[FindingCount, ...]
    """What else is worth knowing: of used conversations, which can have several notes, and of files."""
    documents: int
    """Rows of tokens: one per used conversation, more where the template asks for one row per answer."""
    tokens: int
    supervised_tokens: int
    mask_samples: int
    """Conversations whose mask was compared with the answers by decoding it again."""

    @property
    def num_dropped(self) -> int:
        """Conversations dropped, over all findings."""
        return sum(entry.count for entry in self.dropped)

    def count(self, finding: Finding) -> int:
        """Conversations with this finding, dropped or noted; 0 if none."""
        return sum(entry.count for entry in (*self.dropped, *self.notes) if entry.finding is finding)

    def account(self) -> dict[str, Any]:
        """What was dropped and why, in numbers and words: short enough to travel with a heartbeat."""
        return {
            "read": self.read,
            "used": self.used,
            "other_split": self.other_split,
            "num_dropped": self.num_dropped,
            "dropped": [
                {
                    "finding": entry.finding.value,
                    "words": entry.finding.words,
                    "count": entry.count,
                    "examples": [where[:_LONGEST_EXAMPLE] for where in entry.examples],
                }
                for entry in self.dropped
            ],
        }

    def summary_lines(self) -> list[str]:
        """The report in words, most important first, one line each."""
        share = self.supervised_tokens / self.tokens if self.tokens else 0.0
        lines = [
            f"{counted(self.read, 'conversation')} read: {self.used:,} used for {self.split}, "
            f"{self.other_split:,} in the other split, {self.num_dropped:,} dropped",
            f"{counted(self.documents, 'document')}, {counted(self.tokens, 'token')}, "
            f"{self.supervised_tokens:,} of them supervised ({share:.0%})",
        ]
        lines += [f"dropped {entry.in_words()}" for entry in self.dropped]
        lines += [f"note {entry.in_words()}" for entry in self.notes]
        if self.mask_samples:
            lines.append(f"loss mask verified on {counted(self.mask_samples, 'conversation')}")
        return lines


class ReportBuilder:
    """Counts while a data set is read. Not thread-safe."""

    def __init__(self) -> None:
        self.read = 0
        self.used = 0
        self.other_split = 0
        self.documents = 0
        self.tokens = 0
        self.supervised_tokens = 0
        self.mask_samples = 0
        self._dropped: Counter[Finding] = Counter()
        self._notes: Counter[Finding] = Counter()
        self._examples: dict[Finding, list[str]] = {}

    @property
    def num_dropped(self) -> int:
        """Conversations dropped so far."""
        return self._dropped.total()

    def add(self, report: DataReport) -> None:
        """Count in what was found in the records that follow."""
        for name in ("read", "used", "other_split", "documents", "tokens", "supervised_tokens", "mask_samples"):
            setattr(self, name, getattr(self, name) + getattr(report, name))
        for counter, entries in ((self._dropped, report.dropped), (self._notes, report.notes)):
            for entry in entries:
                counter[entry.finding] += entry.count
                for where in entry.examples:
                    self._keep_example(entry.finding, where)

    def drop(self, finding: Finding, where: str) -> None:
        """Count a conversation at `where` (`file:line`) that gave nothing."""
        self._dropped[finding] += 1
        self._keep_example(finding, where)

    def note(self, finding: Finding, where: str) -> None:
        """Count something about a conversation that is used."""
        self._notes[finding] += 1
        self._keep_example(finding, where)

    def _keep_example(self, finding: Finding, where: str) -> None:
        examples = self._examples.setdefault(finding, [])
        if len(examples) < MAX_EXAMPLES and where not in examples:
            examples.append(where)

    def _counts(self, counter: Counter[Finding]) -> tuple[FindingCount, ...]:
        return tuple(
            FindingCount(finding=finding, count=count, examples=tuple(self._examples[finding]))
            # The finding decides between equal counts: a load that was broken off and resumed reports the same.
            for finding, count in sorted(counter.items(), key=lambda item: (-item[1], item[0]))
        )

    def build(self, split: Literal["train", "heldout"]) -> DataReport:
        """The account so far, frozen."""
        return DataReport(
            split=split,
            read=self.read,
            used=self.used,
            other_split=self.other_split,
            dropped=self._counts(self._dropped),
            notes=self._counts(self._notes),
            documents=self.documents,
            tokens=self.tokens,
            supervised_tokens=self.supervised_tokens,
            mask_samples=self.mask_samples,
        )
