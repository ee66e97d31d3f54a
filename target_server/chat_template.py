"""Renders conversations with the tokenizer's chat template and finds the answers in the text, for any template.

Nothing here knows a template by name. A probe conversation shows what the template writes after an answer; the
answer's place is then anchored from both sides: it begins after the prompt that the model would be given
(`add_generation_prompt`), and ends before that closing text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jinja2.exceptions import TemplateError

from slipstream.chat_rendering import render_chat
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.wire.data_report import Finding
from target_server.conversations import Conversation, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBE_ANSWER = "Probe7answer"


@dataclass(frozen=True)
class Answer:
    """Where an answer lies in a row's text, in characters."""

    turn: int
    """Index of the turn in the conversation."""
    prompt_end: int
    """End of the prompt the model is given; between here and `start` the template may write something of its own."""
    start: int
    """First character of the content."""
    end: int
    """End of the end-of-turn token; of the content where the answer was cut off."""


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

    def _probe_closing(self) -> str:
        try:
            text = self._render([Turn("user", "Hello"), Turn("assistant", _PROBE_ANSWER)])
        except (TemplateError, TypeError, ValueError) as error:
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

    def _render(self, turns: Sequence[Turn], *, as_prompt: bool = False) -> str:
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        return render_chat(self._tokenizer, messages, as_prompt=as_prompt)

    def render(self, conversation: Conversation) -> RenderedConversation:
        """Text and answers of a conversation.

        Every answer that can be found is trained. If the whole text repeats each answer exactly as it was rendered
        when it was the last turn, there is one row; otherwise (templates that strip the thinking from earlier
        turns) one row per answer, each ending with that answer, as the model saw it when it wrote it.
        """
        found: list[tuple[str, Answer]] = []
        problem: Finding | None = None
        try:
            for index, turn in enumerate(conversation.turns):
                if turn.role == "assistant":
                    text, answer = self._locate(conversation, index)
                    if answer is None:
                        problem = Finding.ANSWER_FIRST if index == 0 else Finding.ANSWER_REWRITTEN
                    else:
                        found.append((text, answer))
        except (TemplateError, TypeError, ValueError):
            return RenderedConversation((), Finding.TEMPLATE_REFUSED)
        if not found:
            return RenderedConversation((), problem)
        whole, last = found[-1]
        rows: tuple[Row, ...]
        if all(whole.startswith(text[: answer.end]) for text, answer in found[:-1]):
            rows = (Row(whole[: last.end], tuple(answer for _, answer in found)),)
        else:
            rows = tuple(Row(text[: answer.end], (answer,)) for text, answer in found)
        return RenderedConversation(rows, problem)

    def _locate(self, conversation: Conversation, index: int) -> tuple[str, Answer | None]:
        """The text through turn `index` (an answer), and where the answer lies in it, if that can be told."""
        turns = conversation.turns[: index + 1]
        if index == 0:
            return "", None  # no prompt: many templates cannot render an empty conversation
        prompt = self._render(turns[:-1], as_prompt=True)
        text = self._render(turns)
        if not text.startswith(prompt) or not text.endswith(self.closing):
            return text, None
        content_end = len(text) - len(self.closing)
        start = _content_start(text, len(prompt), content_end, turns[-1].content)
        if start is None:
            return text, None
        answer = Answer(index, prompt_end=len(prompt), start=start, end=content_end + len(self.end_of_turn))
        if not conversation.finished and index == len(conversation.turns) - 1:
            answer = replace(answer, end=content_end)
        return text, answer


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
