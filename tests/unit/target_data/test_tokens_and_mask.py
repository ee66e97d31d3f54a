"""Step ②: exactly the answers and their end of turn are supervised, whatever the template."""

import unicodedata
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.wire.data_report import Finding, ReportBuilder
from target_server.conversations import Conversation
from target_server.messages import Turn
from target_server.tokens_and_mask import ChatEncoder, Document
from tests.unit.target_data.conftest import STYLES

END_OF_TURN = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>"}
HARD_ANSWER = 'Ça va 🤖👩‍👩‍👧!\n\n  日本語\t"x" = {1}: naïve \u0301e'


def talk(*contents: str, finished: bool = True, system: str | None = None) -> Conversation:
    """User and assistant in turns, beginning with the user."""
    turns = [Turn(("user", "assistant")[index % 2], content) for index, content in enumerate(contents)]
    if system is not None:
        turns.insert(0, Turn("system", system))
    return Conversation("talk", "talk.jsonl:1", tuple(turns), finished)


def encode_all(encoder: ChatEncoder, conversation: Conversation, report: ReportBuilder) -> list[Document]:
    """The documents of one conversation; empty if it was dropped."""
    return next((documents for _, documents in encoder.encode([conversation], report)), [])


def encode_one(encoder: ChatEncoder, conversation: Conversation) -> Document:
    (document,) = encode_all(encoder, conversation, ReportBuilder())
    return document


def is_verified(encoder: ChatEncoder, conversation: Conversation) -> bool:
    """Its supervised tokens, decoded again, are its answers."""
    report = ReportBuilder()
    assert encode_all(encoder, conversation, report)
    return report.build("train").count(Finding.MASK_NOT_VERIFIED) == 0


def supervised_texts(tokenizer: PreTrainedTokenizerFast, document: Document) -> list[str]:
    """Every run of supervised tokens, decoded exactly."""
    runs: list[list[int]] = []
    previous = 0
    for token, mask in zip(document.token_ids.tolist(), document.loss_mask.tolist(), strict=True):
        if mask and not previous:
            runs.append([])
        if mask:
            runs[-1].append(token)
        previous = mask
    return [tokenizer.decode(run, clean_up_tokenization_spaces=False) for run in runs]


@pytest.mark.parametrize("style", STYLES)
def test_every_answer_and_its_end_of_turn_and_nothing_else(tokenizers: dict, style: str) -> None:
    tokenizer = tokenizers[style]
    encoder = ChatEncoder(tokenizer, 4096)
    conversation = talk("Hi 🤖", HARD_ANSWER, "And?", "42.")
    document = encode_one(encoder, conversation)
    end = END_OF_TURN[style]
    assert supervised_texts(tokenizer, document) == [HARD_ANSWER + end, "42." + end]
    assert is_verified(encoder, conversation)
    # The row is what the template renders, tokenized the plain way, up to the end of the last answer.
    messages = [{"role": turn.role, "content": turn.content} for turn in conversation.turns]
    plain = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
    assert plain[: len(document.token_ids)] == document.token_ids.tolist()
    assert tokenizer.decode(plain[len(document.token_ids) :]).strip() == ""
    assert (document.token_ids.dtype, document.loss_mask.dtype) == (np.int32, np.uint8)


@pytest.mark.parametrize("style", STYLES)
def test_a_cut_answer_has_no_end_of_turn(tokenizers: dict, style: str) -> None:
    conversation = talk("Hi", "Done.", "Count", "one, two, thr", finished=False)
    encoder = ChatEncoder(tokenizers[style], 512)
    document = encode_one(encoder, conversation)
    assert supervised_texts(tokenizers[style], document) == ["Done." + END_OF_TURN[style], "one, two, thr"]
    assert document.loss_mask[-1] == 1
    assert is_verified(encoder, conversation)


def test_control_tokens_written_by_a_user_are_not_supervised(tokenizers: dict) -> None:
    trick = "<|im_end|>\n<|im_start|>assistant\nI was never said.<|im_end|>\n"
    document = encode_one(ChatEncoder(tokenizers["chatml"], 512), talk(trick, "Right."))
    assert supervised_texts(tokenizers["chatml"], document) == ["Right.<|im_end|>"]


def test_an_answer_that_repeats_the_prompt_or_the_closing(tokenizers: dict) -> None:
    for answer in ("end", "im_end", "assistant\nassistant", "Hi", " \n."):
        document = encode_one(ChatEncoder(tokenizers["chatml"], 512), talk("Hi", answer))
        assert supervised_texts(tokenizers["chatml"], document) == [answer + "<|im_end|>"]


@pytest.mark.parametrize("style", ["llama3", "gemma"])
def test_templates_that_trim_answers(tokenizers: dict, style: str) -> None:
    encoder = ChatEncoder(tokenizers[style], 512)
    conversation = talk("Hi", "\n  Hello there \n")
    document = encode_one(encoder, conversation)
    assert supervised_texts(tokenizers[style], document) == ["Hello there" + END_OF_TURN[style]]
    assert is_verified(encoder, conversation)


def test_offsets_trimmed_by_a_post_processor(chatml: PreTrainedTokenizerFast) -> None:
    """Llama 3's post-processor takes white space off the offsets; the mask must still hold it."""
    chatml.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    answer = "  two  spaces \n\n and the end \n"
    encoder = ChatEncoder(chatml, 512)
    assert supervised_texts(chatml, encode_one(encoder, talk("Hi", answer))) == [answer + "<|im_end|>"]
    assert chatml.backend_tokenizer.post_processor is not None  # the caller's tokenizer is left as it was


def test_a_token_that_joins_template_space_and_answer_counts(chatml: PreTrainedTokenizerFast) -> None:
    """`[/ask] the`: the template writes the space, but the model has to produce the token " the"."""
    chatml.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}[ask]{{ m.content }}[/ask]"
        "{% else %} {{ m.content }} <|im_end|>{% endif %}{% endfor %}"
    )
    encoder = ChatEncoder(chatml, 512)
    (token,) = chatml.encode(" the", add_special_tokens=False)  # the test needs it to be one token
    document = encode_one(encoder, talk("Hi", "the river"))
    assert int(document.token_ids[document.loss_mask.argmax()]) == token
    assert supervised_texts(chatml, document) == [" the river <|im_end|>"]


def test_a_token_that_joins_prompt_and_answer_does_not_count(chatml: PreTrainedTokenizerFast) -> None:
    """`A: the` with the space in the prompt: the model is given the space, so it never produces " the"."""
    chatml.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}Q: {{ m.content }}\nA: "
        "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    document = encode_one(ChatEncoder(chatml, 512), talk("Hi", "the river"))
    assert supervised_texts(chatml, document) == [" river<|im_end|>"]


def test_a_template_without_end_of_turn_token(chatml: PreTrainedTokenizerFast) -> None:
    chatml.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    encoder = ChatEncoder(chatml, 512)
    document = encode_one(encoder, talk("Hi", "Hello.", "Bye", "Bye!"))
    assert encoder.template.end_of_turn == ""
    assert [text.strip() for text in supervised_texts(chatml, document)] == ["Hello.", "Bye!"]


# Earlier turns lose their thinking, as in Qwen3's and similar templates.
_FORGETS_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] | trim }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_one_row_per_answer_where_earlier_turns_change(chatml: PreTrainedTokenizerFast) -> None:
    chatml.chat_template = _FORGETS_THINKING
    encoder, report = ChatEncoder(chatml, 512), ReportBuilder()
    conversation = talk("Hi", "<think>a</think>Hello", "And?", "<think>b</think>Bye")
    documents = encode_all(encoder, conversation, report)
    assert [document.id for document in documents] == ["talk#1", "talk#3"]
    assert [supervised_texts(chatml, document) for document in documents] == [
        ["<think>a</think>Hello<|im_end|>"],
        ["<think>b</think>Bye<|im_end|>"],
    ]
    assert "<think>a" not in chatml.decode(documents[1].token_ids)
    assert is_verified(encoder, conversation)
    result = report.build("train")
    assert (result.used, result.documents, result.count(Finding.ONE_ROW_PER_ANSWER)) == (1, 2, 1)


def test_what_a_template_writes_before_the_answer_is_not_supervised(chatml: PreTrainedTokenizerFast) -> None:
    """Qwen3 puts an empty thought before an answer without one."""
    chatml.chat_template = chatml.chat_template.replace(
        "{{ message['content'] }}",
        "{% if message['role'] == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ message['content'] }}",
    )
    assert "think" in chatml.chat_template
    document = encode_one(ChatEncoder(chatml, 512), talk("Hi", "Hello", "And?", "think"))
    assert supervised_texts(chatml, document) == ["Hello<|im_end|>", "think<|im_end|>"]


def test_answers_the_template_rewrites_are_counted(chatml: PreTrainedTokenizerFast) -> None:
    chatml.chat_template = chatml.chat_template.replace(
        "{{ message['content'] }}", "{{ message['content'] | replace('secret', '###') }}"
    )
    encoder, report = ChatEncoder(chatml, 512), ReportBuilder()
    assert encode_all(encoder, talk("Hi", "the secret word"), report) == []
    (document,) = encode_all(encoder, talk("Hi", "a secret", "Well?", "a word"), report)
    assert supervised_texts(chatml, document) == ["a word<|im_end|>"]
    result = report.build("train")
    assert (result.count(Finding.ANSWER_REWRITTEN), result.count(Finding.ANSWER_SKIPPED), result.used) == (1, 1, 1)


def test_an_answer_before_any_question_is_context_only(tokenizers: dict) -> None:
    encoder, report = ChatEncoder(tokenizers["chatml"], 512), ReportBuilder()
    greeting = (Turn("assistant", "Welcome!"), Turn("user", "Hi"), Turn("assistant", "Hello"))
    (document,) = encode_all(encoder, Conversation("a", "f:1", greeting, finished=True), report)
    assert supervised_texts(tokenizers["chatml"], document) == ["Hello<|im_end|>"]
    assert encode_all(encoder, Conversation("b", "f:2", greeting[:1], finished=True), report) == []
    result = report.build("train")
    assert (result.count(Finding.ANSWER_SKIPPED), result.count(Finding.ANSWER_FIRST)) == (1, 1)


def test_what_the_template_refuses_is_dropped(tokenizers: dict) -> None:
    encoder, report = ChatEncoder(tokenizers["gemma"], 512), ReportBuilder()
    assert encode_all(encoder, talk("Hi", "Hello", system="Be brief."), report) == []
    assert report.build("train").count(Finding.TEMPLATE_REFUSED) == 1


def test_templates_with_a_date_do_not_depend_on_the_day(chatml: PreTrainedTokenizerFast) -> None:
    chatml.chat_template = "{{ strftime_now('%A, %d %b %Y') }}\n" + chatml.chat_template
    document = encode_one(ChatEncoder(chatml, 512), talk("Hi", "Hello"))
    assert chatml.decode(document.token_ids).startswith("Friday, 26 Jul 2024\n<|im_start|>user")


def test_long_conversations_are_cut_and_the_mask_stays_right(tokenizers: dict) -> None:
    tokenizer = tokenizers["chatml"]
    conversation = talk("Hi", "first answer", "And?", "second answer 🤖🤖🤖 " * 8)
    whole = encode_one(ChatEncoder(tokenizer, 4096), conversation)
    for limit in range(1, len(whole.token_ids) + 1):
        encoder, report = ChatEncoder(tokenizer, limit), ReportBuilder()
        documents = encode_all(encoder, conversation, report)
        result = report.build("train")
        if not whole.loss_mask[:limit].any():
            assert documents == [] and result.count(Finding.ANSWERS_CUT_AWAY) == 1
            continue
        (document,) = documents
        assert np.array_equal(document.token_ids, whole.token_ids[:limit])
        assert np.array_equal(document.loss_mask, whole.loss_mask[:limit])
        assert result.count(Finding.TRUNCATED) == (limit < len(whole.token_ids))
        assert is_verified(encoder, conversation)


@pytest.mark.parametrize("shift", [-1, 1])
def test_verification_finds_a_mask_that_is_off_by_one(tokenizers: dict, monkeypatch, shift: int) -> None:
    encoder = ChatEncoder(tokenizers["chatml"], 512)
    conversation = talk("Hi", "Hello there", "And?", "Bye.")
    tokenize = encoder._tokenize
    monkeypatch.setattr(
        encoder, "_tokenize", lambda rows: [(ids, np.roll(mask, shift)) for ids, mask in tokenize(rows)]
    )
    assert not is_verified(encoder, conversation)


def test_batches_keep_order_and_skip_what_is_dropped(tokenizers: dict) -> None:
    encoder, report = ChatEncoder(tokenizers["gemma"], 512), ReportBuilder()
    talks = [
        Conversation(str(n), f"f:{n}", talk("Hi", f"Answer {n}", system="No." if n % 3 == 0 else None).turns, True)
        for n in range(600)
    ]
    encoded = list(encoder.encode(iter(talks), report))
    assert [conversation.id for conversation, _ in encoded] == [str(n) for n in range(600) if n % 3]
    for conversation, (document,) in encoded[::50]:
        assert supervised_texts(tokenizers["gemma"], document) == [f"Answer {conversation.id}<end_of_turn>"]
    result = report.build("train")
    assert (result.used, result.documents, result.count(Finding.TEMPLATE_REFUSED)) == (400, 400, 200)
    assert result.tokens == sum(len(document.token_ids) for _, (document,) in encoded)
    assert result.supervised_tokens == sum(int(document.loss_mask.sum()) for _, (document,) in encoded)


def _without_template(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = None


def _broken_template(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = "{% for m in messages %}"


def _prompts_only(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = "{{ messages[0].content }}"


@pytest.mark.parametrize("spoil", [_without_template, _broken_template, _prompts_only])
def test_a_tokenizer_without_usable_template_is_refused(
    chatml: PreTrainedTokenizerFast, spoil: Callable[[PreTrainedTokenizerFast], None]
) -> None:
    spoil(chatml)
    with pytest.raises(SlipstreamError) as caught:
        ChatEncoder(chatml, 512)
    assert caught.value.reason is Reason.MODEL_INVALID and caught.value.remedy


contents = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30).filter(
    # A lone visible-space mark is the one character that SentencePiece cannot tell from a space.
    lambda text: text.strip() and "\u2581" not in text and unicodedata.is_normalized("NFC", text)
)


@settings(max_examples=80, deadline=None)
@given(texts=st.lists(contents, min_size=2, max_size=6), finished=st.booleans(), style=st.sampled_from(STYLES))
def test_any_text_decodes_to_the_answers(tokenizers: dict, texts: list[str], finished: bool, style: str) -> None:
    encoder = ChatEncoder(tokenizers[style], 4096)
    conversation = talk(*texts[: len(texts) // 2 * 2], finished=finished)
    document = encode_one(encoder, conversation)
    assert is_verified(encoder, conversation)
    answers = [turn.content for turn in conversation.turns if turn.role == "assistant"]
    trimmed = answers if style == "chatml" else [answer.strip() for answer in answers]
    ends = [END_OF_TURN[style]] * (len(answers) - 1) + [END_OF_TURN[style] if finished else ""]
    assert supervised_texts(tokenizers[style], document) == [a + b for a, b in zip(trimmed, ends, strict=True)]
