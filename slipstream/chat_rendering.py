"""Chat messages as text: the same for documents that a drafter is trained on and prompts that it is measured with."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Templates that write today's date would make a text depend on the day it is rendered. This macro takes the place of
# transformers' strftime_now and always gives one Friday.
_FIXED_DATE = {
    "%d": "26", "%-d": "26", "%b": "Jul", "%B": "July", "%m": "07", "%Y": "2024", "%y": "24", "%A": "Friday",
    "%a": "Fri", "%H": "12", "%M": "00", "%S": "00",
}  # fmt: skip
_FIXED_DATE_MACRO = (
    "{%- macro strftime_now(format) -%}{{ format"
    + "".join(f" | replace('{directive}', '{value}')" for directive, value in _FIXED_DATE.items())
    + " }}{%- endmacro -%}"
)


def render_chat(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Mapping[str, Any]],
    *,
    as_prompt: bool,
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The tokenizer's chat template applied to messages of `role` and `content`, on one fixed day.

    Args:
        tokenizer: with a chat template.
        messages: in order; the template may know more keys, such as `tool_calls` and `reasoning_content`.
        as_prompt: add what makes the model answer next.
        tools: definitions of tools that the model may call, as JSON schemas.

    Raises:
        jinja2.TemplateError, TypeError, ValueError: the template refuses these messages.
    """
    schemas = [dict(tool) for tool in tools] or None
    template: str = tokenizer.get_chat_template(tools=schemas)
    text = tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        tools=schemas,
        chat_template=_FIXED_DATE_MACRO + template if "strftime_now" in template else template,
        tokenize=False,
        add_generation_prompt=as_prompt,
    )
    assert isinstance(text, str)
    return text
