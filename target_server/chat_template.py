"""Renders conversations with the tokenizer's chat template and finds the answers in the text, for any template.

Nothing here knows a template by name. A probe conversation shows what the template writes after an answer; the
answer's place is then anchored from both sides: it begins after the prompt that the model would be given
(`add_generation_prompt`), and ends before that closing text.
"""

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import TemplateError

from slipstream.chat_rendering import render_chat
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.wire.data_report import Finding
from target_server.conversations import Conversation
from target_server.messages import Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBE_ANSWER = "Probe7answer"
_PROBE_REASONING = "Probe7reasoning"
_PROBE_CALL = "Probe7call"
_PROBE_RESULT = "Probe7result"
_REFUSALS = (TemplateError, TypeError, ValueError, RecursionError)


@dataclass(frozen=True)
class Answer:
    """Where an answer lies in a row's text, in characters."""

    turn: int
    """Index of the turn in the conversation."""
    prompt_end: int
    """End of the prompt the model is given; between here and `start` the template may write something of its own."""
    start: int
    """First character of what the model wrote: of the content, or of what the template puts around reasoning and
    tool calls, since the model has to produce that, too."""
    end: int
    """End of the end-of-turn token; of the content where the answer was cut off."""
    text: str
    """What the supervised tokens must decode to, apart from white space."""


@dataclass(frozen=True)
class Row:
    """One text to tokenize. It ends with its last answer: what follows teaches nothing."""

    text: str
    answers: tuple[Answer, ...]


@dataclass(frozen=True)
class RenderedConversation:
    """Rows of a conversation: usually one, or one per answer where earlier turns are rendered differently later."""

    rows: tuple[Row, ...]
    problem: Finding | None
    """Why there is no row, or (with rows) why an answer was left unsupervised."""
    without_reasoning: bool = False
    """Whether a trained answer had reasoning that the template does not write."""


class ChatTemplate:
    """The tokenizer's chat template, understood well enough to find every answer exactly."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Probe the template. Raises SlipstreamError (MODEL_INVALID) if there is none or it shows no answer."""
        if not tokenizer.chat_template:
            raise SlipstreamError(
                "The tokenizer has no chat template, so conversations cannot become text.",
                reason=Reason.MODEL_INVALID,
                remedy="Use an instruction-tuned model, or put its template into chat_template.jinja "
                "in the model's directory.",
            )
        self._tokenizer = tokenizer
        self.closing = self._probe_closing()
        self.end_of_turn = _through_first_special_token(self.closing, tokenizer)
        """What the template writes after an answer, through its first special token; empty if it writes none."""
        self.writes_reasoning = self._probe_reasoning()
        self.writes_tools = self._probe_tools()
        """Whether tool calls and their results become text; templates that do not know them leave them out."""

    def _probe_closing(self) -> str:
        try:
            text = self._render([Turn("user", "Hello"), Turn("assistant", _PROBE_ANSWER)])
        except _REFUSALS as error:
            raise SlipstreamError(
                f"The chat template fails on a question and an answer: {error}",
                reason=Reason.MODEL_INVALID,
                remedy="Check chat_template.jinja (or chat_template in tokenizer_config.json) of the model.",
            ) from error
        if text.count(_PROBE_ANSWER) != 1:
            raise SlipstreamError(
                "The chat template does not write the assistant's answer exactly once.",
                reason=Reason.MODEL_INVALID,
                remedy="Use a template that renders whole conversations, not only prompts.",
            )
        return text.partition(_PROBE_ANSWER)[2]

    def _probe_reasoning(self) -> bool:
        turns = [Turn("user", "Hello"), Turn("assistant", _PROBE_ANSWER, reasoning=_PROBE_REASONING)]
        try:
            return _PROBE_REASONING in self._render(turns)
        except _REFUSALS:
            return False

    def _probe_tools(self) -> bool:
        # Nine characters: Mistral's templates take no other ids.
        call = {"type": "function", "id": "probe7ids", "function": {"name": _PROBE_CALL, "arguments": {"a": 1}}}
        turns = [
            Turn("user", "Hello"),
            Turn("assistant", "", tool_calls=(call,)),
            Turn("tool", _PROBE_RESULT, name=_PROBE_CALL, tool_call_id="probe7ids"),
            Turn("assistant", _PROBE_ANSWER),
        ]
        try:
            text = self._render(turns)
        except _REFUSALS:
            return False
        return _PROBE_CALL in text and _PROBE_RESULT in text

    def _render(
        self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]] = (), *, as_prompt: bool = False
    ) -> str:
        messages = [turn.message() for turn in turns]
        return render_chat(self._tokenizer, messages, as_prompt=as_prompt, tools=tools)

    def render(self, conversation: Conversation, *, only_last: bool = False) -> RenderedConversation:
        """Text and answers of a conversation.

        Every answer that is trained and can be found is supervised; with `only_last` no answer but the last. If the
        whole text repeats each answer exactly as it was rendered when it was the last turn, there is one row;
        otherwise (templates that strip the thinking from earlier turns) one row per answer, each ending with that
        answer, as the model saw it when it wrote it.
        """
        trained = _trained_turns(conversation, only_last=only_last)
        if not trained:
            return RenderedConversation((), Finding.NOTHING_TRAINED)
        if conversation.uses_tools and not self.writes_tools:
            return RenderedConversation((), Finding.TOOLS_NOT_WRITTEN)
        found: list[tuple[str, Answer]] = []
        problem: Finding | None = None
        try:
            for index in trained:
                text, answer = self._locate(conversation, index)
                if answer is None:
                    problem = Finding.ANSWER_FIRST if index == 0 else Finding.ANSWER_REWRITTEN
                else:
                    found.append((text, answer))
        except _REFUSALS:
            return RenderedConversation((), Finding.TEMPLATE_REFUSED)
        if not found:
            return RenderedConversation((), problem)
        lost = not self.writes_reasoning and any(conversation.turns[answer.turn].reasoning for _, answer in found)
        return RenderedConversation(_rows(found), problem, without_reasoning=lost)

    def _locate(self, conversation: Conversation, index: int) -> tuple[str, Answer | None]:
        """The text through turn `index` (an answer), and where the answer lies in it, if that can be told."""
        turns = conversation.turns[: index + 1]
        if index == 0:
            return "", None  # no prompt: many templates cannot render an empty conversation
        prompt = self._render(turns[:-1], conversation.tools, as_prompt=True)
        text = self._render(turns, conversation.tools)
        if not text.startswith(prompt) or not text.endswith(self.closing):
            return text, None
        content_end = len(text) - len(self.closing)
        turn = turns[-1]
        start: int | None
        if turn.tool_calls or (turn.reasoning and self.writes_reasoning):
            written = text[len(prompt) : content_end]
            start = len(prompt) if self._says_all(written, turn) else None
        else:
            written = turn.content
            start = _content_start(text, len(prompt), content_end, turn.content)
        if start is None:
            return text, None
        answer = Answer(
            index,
            prompt_end=len(prompt),
            start=start,
            end=content_end + len(self.end_of_turn),
            text=written + self.end_of_turn,
        )
        if not conversation.finished and index == len(conversation.turns) - 1:
            answer = replace(answer, end=content_end, text=written)
        return text, answer

    def _says_all(self, written: str, turn: Turn) -> bool:
        """Whether what the template wrote for an answer holds its reasoning, its content and its calls."""
        said = comparable(written)
        parts = [turn.content, *(call["function"]["name"] for call in turn.tool_calls)]
        if self.writes_reasoning:
            parts.append(turn.reasoning)
        return all(comparable(part) in said for part in parts)


def comparable(text: str) -> str:
    """NFC without white space: templates trim and re-space answers, tokenizers normalise."""
    return unicodedata.normalize("NFC", "".join(text.split()))


def _trained_turns(conversation: Conversation, *, only_last: bool) -> list[int]:
    answers = [index for index, turn in enumerate(conversation.turns) if turn.role == "assistant"]
    return [index for index in (answers[-1:] if only_last else answers) if conversation.turns[index].trained]


def _rows(found: Sequence[tuple[str, Answer]]) -> tuple[Row, ...]:
    """One row where every answer's text begins the last one's, else a row per answer."""
    whole, last = found[-1]
    if all(whole.startswith(text[: answer.end]) for text, answer in found[:-1]):
        return (Row(whole[: last.end], tuple(answer for _, answer in found)),)
    return tuple(Row(text[: answer.end], (answer,)) for text, answer in found)


def _content_start(text: str, begin: int, end: int, content: str) -> int | None:
    """Where `content` starts if text[begin:end] ends with it: as it stands, else apart from white space."""
    if end - begin >= len(content) and text.endswith(content, begin, end):
        return end - len(content)
    wanted = "".join(content.split())
    position, matched = end, 0
    while matched < len(wanted):
        position -= 1
        if position < begin:
            return None
        if text[position].isspace():
            continue
        if text[position] != wanted[-1 - matched]:
            return None
        matched += 1
    return position


def _through_first_special_token(closing: str, tokenizer: "PreTrainedTokenizerBase") -> str:
    """The beginning of `closing` through its first special or added token; empty if it holds none."""
    names = {*tokenizer.all_special_tokens, *(str(token) for token in tokenizer.added_tokens_decoder.values())}
    ends = [(closing.find(name), -len(name)) for name in names if name.strip() and name in closing]
    if not ends:
        return ""
    position, negative_length = min(ends)
    return closing[: position - negative_length]
