"""The target answers the prompts of a data set itself, since a drafter learns best from the target's own text.

Answers are written as token rows, exactly the ids that were generated. The work is done in fixed chunks, each with a
random state of its own and appended as a whole, so that a run which was killed goes on and writes the same file.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from jinja2.exceptions import TemplateError
from transformers import GenerationConfig, StoppingCriteriaList

from slipstream.chat_rendering import render_chat
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.target_loading import LoadedTarget, never_choose_padding
from slipstream.telemetry.logs import log_event
from slipstream.wire.data_report import DataReport, Finding, ReportBuilder
from target_server.answering_progress import AnsweringProgress, EveryToken
from target_server.answers_file import BATCH_ON_CPU, append_rows, check_settings, keep_rows, whole_rows
from target_server.chat_template import ChatTemplate
from target_server.conversations import Prompt, RecordFormat, parse_prompt
from target_server.data_files import unreadable
from target_server.messages import BadRecordError
from target_server.record_files import Position, Record, SourceFile, read_records

CHUNK_BATCHES = 8
"""Batches in a chunk; its prompts are sorted by length, so that little is padding. At most a chunk is answered again by
a call that goes on."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn. Temperature 0 is greedy."""

    max_new_tokens: int = 1024
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    seed: int = 0
    batch: int = BATCH_ON_CPU


@dataclass(frozen=True)
class Asked:
    """A prompt as the model is given it."""

    id: str
    token_ids: list[int]
    source: str | None = None
    """Of a prompt that drafters are measured with; its row says so, and whose answer it is."""


@dataclass(frozen=True)
class _Answer:
    token_ids: list[int]
    finished: bool


class Regenerator:
    """A loaded target with its sampling settings."""

    def __init__(self, target: LoadedTarget, sampling: Sampling, ends: frozenset[int] | None = None) -> None:
        """`ends`: tokens that end an answer; default: what ends a turn in the template, and the model's own.

        Raises SlipstreamError (MODEL_INVALID) where there is none by default, so that no answer would end.
        """
        never_choose_padding(target)
        self.progress = AnsweringProgress()
        self._model, self._tokenizer = target.model, target.tokenizer
        self.sampling = sampling
        self._ends = sorted(self._end_tokens() if ends is None else ends)
        self.max_prompt_tokens = target.model.config.get_text_config().max_position_embeddings - sampling.max_new_tokens
        if self.max_prompt_tokens < 1:
            raise SlipstreamError(
                f"The target takes {self.max_prompt_tokens + sampling.max_new_tokens} positions; answers of "
                f"{sampling.max_new_tokens} tokens leave none for a prompt.",
                reason=Reason.SPEC_INVALID,
                remedy="Lower --max-new-tokens; with --heldout, eval.max_new_tokens.",
            )

    def _end_tokens(self) -> set[int]:
        ends = set()
        end_of_turn = ChatTemplate(self._tokenizer).end_of_turn
        if end_of_turn:
            ends.add(self._tokenizer(end_of_turn, add_special_tokens=False)["input_ids"][-1])
        configured = self._model.generation_config.eos_token_id
        ends |= set(configured if isinstance(configured, list) else [] if configured is None else [configured])
        if not ends:
            raise SlipstreamError(
                "Neither the chat template nor the generation configuration names a token that ends an answer.",
                reason=Reason.MODEL_INVALID,
                remedy="Set eos_token_id in generation_config.json of the model.",
            )
        return ends

    def tokenize(self, prompt: Prompt) -> list[int]:
        """What the model is given. Raises jinja2.TemplateError, TypeError or ValueError where the template refuses."""
        messages = [turn.message() for turn in prompt.turns]
        text = render_chat(self._tokenizer, messages, as_prompt=True, tools=prompt.tools)
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def answer(self, chunk: Sequence[Asked], number: int) -> list[_Answer]:
        """The answers of a chunk, in order; a function of the chunk, its number and the settings."""
        seed = hashlib.sha256(f"slipstream.regeneration.v1:{self.sampling.seed}:{number}".encode()).digest()[:8]
        torch.manual_seed(int.from_bytes(seed, "little") >> 1)
        order = sorted(range(len(chunk)), key=lambda index: (len(chunk[index].token_ids), index))
        answers: dict[int, _Answer] = {}
        for begin in range(0, len(order), self.sampling.batch):
            batch = order[begin : begin + self.sampling.batch]
            generated = self._generate([chunk[index].token_ids for index in batch])
            answers |= zip(batch, generated, strict=True)
            self.progress.batch_done(len(batch), _tokens(generated))
        return [answers[index] for index in range(len(chunk))]

    @torch.inference_mode()
    def _generate(self, prompts: Sequence[list[int]]) -> list[_Answer]:
        longest = max(map(len, prompts))
        told = EveryToken(self.progress, lambda rows: _tokens(map(self._cut, rows[:, longest:].tolist())))
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):  # padded on the left
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        try:
            generated = self._model.generate(
                input_ids=ids.to(self._model.device),
                attention_mask=mask.to(self._model.device),
                generation_config=self._generation_config(),
                stopping_criteria=StoppingCriteriaList([told]),
            )
        except torch.OutOfMemoryError as error:
            raise SlipstreamError(
                f"A batch of {len(prompts)} prompts of up to {longest} tokens does not fit into the device's memory.",
                reason=Reason.OUT_OF_MEMORY,
                remedy="Lower --batch, or --max-new-tokens (with --heldout: eval.max_new_tokens), and give another "
                "--to, because answers of other settings do not continue a file.",
            ) from error
        answers = [self._cut(row) for row in generated[:, longest:].tolist()]
        if self._model.device.type == "cuda":
            # The cache of keys and values grew step by step, and left blocks that the next batch, of longer prompts,
            # could not use.
            torch.cuda.empty_cache()
        return answers

    def _cut(self, generated: list[int]) -> _Answer:
        end = next((index for index, token in enumerate(generated) if token in self._ends), None)
        return _Answer(generated if end is None else generated[: end + 1], finished=end is not None)

    def _generation_config(self) -> GenerationConfig:
        """Nothing of the model's own: what is not recorded must not change the text."""
        sampling = self.sampling
        drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        return GenerationConfig(
            do_sample=sampling.temperature > 0,
            max_new_tokens=sampling.max_new_tokens,
            eos_token_id=self._ends or None,
            pad_token_id=self._ends[0] if self._ends else 0,
            **(drawn if sampling.temperature > 0 else {}),
        )

    def text(self, answer: _Answer) -> str:
        """For people; the ids are what counts."""
        text: str = self._tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        return text


def regenerate(
    regenerator: Regenerator,
    files: Sequence[SourceFile],
    output: Path,
    *,
    settings: dict[str, Any],
    record_format: RecordFormat,
) -> DataReport:
    """Answer every prompt of `files` and write the rows to `output`; goes on where an earlier call was killed.

    Args:
        regenerator: the target.
        files: records with prompts; answers in them are not looked at.
        output: JSONL; `OUTPUT.settings.json` lies beside it.
        settings: all that decides the answers; recorded, and compared when going on.
        record_format: as in a recipe.

    Raises:
        SlipstreamError: DATA_INVALID for a file that cannot be read, no usable prompt, or an output that was begun with
            other settings; OUT_OF_MEMORY; DISK_FULL.
    """
    report = ReportBuilder()
    asked = _prompts(regenerator, files, record_format, report)
    answer_prompts(regenerator, asked, output, settings, report, _records(files))
    if report.used == 0:
        raise _no_prompt(files, report)
    return report.build("train")


def answer_prompts(
    regenerator: Regenerator,
    asked: Iterator[Asked],
    output: Path,
    settings: dict[str, Any],
    report: ReportBuilder,
    total: int,
) -> None:
    """Write the answers to `output`, or what is missing of them; arguments and errors as of `regenerate`.

    `total`: of prompts, for the log.
    """
    check_settings(output, settings)
    size = CHUNK_BATCHES * regenerator.sampling.batch
    with output.open("ab+") as file:
        done = whole_rows(file)
        chunks = iter(lambda: list(islice(asked, size)), [])
        is_begun = False
        for number, chunk in enumerate(chunks):
            report.used += len(chunk)
            first = number * size
            if first + len(chunk) <= done:
                continue
            if not is_begun:
                is_begun = True
                log_event(_logger, "info", "answering", prompts=f"{first}/{total}")
                regenerator.progress.begin(total, first)
            if first < done:  # cut off in the middle of a chunk: a chunk is answered as a whole
                keep_rows(file, first)
                done = first
            regenerator.progress.total = total - report.num_dropped
            with regenerator.progress.watched():
                answers = regenerator.answer(chunk, number)
            whose = str(settings["target_fingerprint"])
            rows = [_row(regenerator, prompt, answer, whose) for prompt, answer in zip(chunk, answers, strict=True)]
            append_rows(file, rows)
            log_event(_logger, "info", "answered", **regenerator.progress.figures())


def _prompts(
    regenerator: Regenerator, files: Iterable[SourceFile], record_format: RecordFormat, report: ReportBuilder
) -> Iterator[Asked]:
    for file in files:
        for record in _read(file):
            where = f"{file.printable_name}:{record.position.record}"
            report.read += 1
            try:
                prompt = parse_prompt(record.content, record_format, where)
                ids = regenerator.tokenize(prompt)
            except BadRecordError as bad:
                report.drop(bad.finding, where)
                continue
            except (TemplateError, TypeError, ValueError, RecursionError):
                report.drop(Finding.TEMPLATE_REFUSED, where)
                continue
            if not ids or len(ids) > regenerator.max_prompt_tokens:
                report.drop(Finding.ANSWERS_CUT_AWAY, where)
                continue
            yield Asked(prompt.id, ids)


def _records(files: Iterable[SourceFile]) -> int:
    """In all files; at most so many are prompts."""
    return sum(1 for file in files for _ in _read(file))


def _read(file: SourceFile) -> Iterator[Record]:
    """Raises SlipstreamError (DATA_INVALID) where it cannot be read."""
    try:
        yield from read_records(file, Position())
    except OSError as error:
        raise unreadable(file.path, str(error.strerror or error)) from error


def _tokens(answers: Iterable[_Answer]) -> int:
    return sum(len(answer.token_ids) for answer in answers)


def _row(regenerator: Regenerator, prompt: Asked, answer: _Answer, target_fingerprint: str) -> bytes:
    mask = [0] * len(prompt.token_ids) + [1] * len(answer.token_ids)
    row = {
        "id": prompt.id,
        **({} if prompt.source is None else {"source": prompt.source, "target_fingerprint": target_fingerprint}),
        "finished": answer.finished,
        "answer": regenerator.text(answer),
        "input_ids": prompt.token_ids + answer.token_ids,
        "loss_mask": mask,
    }
    return json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _no_prompt(files: Sequence[SourceFile], report: ReportBuilder) -> SlipstreamError:
    why = "; ".join(f"dropped {entry.in_words()}" for entry in report.build("train").dropped[:2])
    return SlipstreamError(
        f"{files[0].path}: no usable prompt in {report.read} records{'; ' + why if why else ''}.",
        reason=Reason.DATA_INVALID,
        remedy='A record is for example {"prompt": "…"} or {"messages": [{"role": "user", "content": "…"}]}.',
    )
