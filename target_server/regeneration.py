"""The target answers the prompts of a data set itself, since a drafter learns best from the target's own text.

Answers are written as token rows, exactly the ids that were generated. The work is done in fixed chunks, each with a
random state of its own and appended as a whole, so that a run which was killed goes on and writes the same file.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

import torch
from jinja2.exceptions import TemplateError
from transformers import GenerationConfig

from slipstream.chat_rendering import render_chat
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.target_loading import LoadedTarget, never_choose_padding
from slipstream.telemetry.logs import log_event
from slipstream.wire.data_report import DataReport, Finding, ReportBuilder
from target_server.chat_template import ChatTemplate
from target_server.conversations import Prompt, RecordFormat, parse_prompt
from target_server.data_files import unreadable
from target_server.messages import BadRecordError
from target_server.record_files import Position, SourceFile, read_records

CHUNK_BATCHES = 8
"""Batches in a chunk; its prompts are sorted by length, so that little is padding. At most a chunk is answered again by
a call that goes on."""
BATCH_ON_CPU = 16
BATCH_ON_GPU = 256
"""Prompts at once: a GPU decodes many about as fast as one."""

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
            answers |= zip(batch, self._generate([chunk[index].token_ids for index in batch]), strict=True)
        return [answers[index] for index in range(len(chunk))]

    @torch.inference_mode()
    def _generate(self, prompts: Sequence[list[int]]) -> list[_Answer]:
        longest = max(map(len, prompts))
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


def default_batch(output: Path, device: str) -> int:
    """Prompts at once where nobody says: as many as the file was begun with, which decide its answers; else by the
    device (`cpu`, `cuda`, `cuda:N`)."""
    begun = _settings_of(output).get("batch") if _is_begun(output) else None
    if isinstance(begun, int) and begun > 0:
        return begun
    return BATCH_ON_GPU if device.startswith("cuda") else BATCH_ON_CPU


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
    answer_prompts(regenerator, _prompts(regenerator, files, record_format, report), output, settings, report)
    if report.used == 0:
        raise _no_prompt(files, report)
    return report.build("train")


def answer_prompts(
    regenerator: Regenerator, asked: Iterator[Asked], output: Path, settings: dict[str, Any], report: ReportBuilder
) -> None:
    """Write the answers to `output`, or what is missing of them; arguments and errors as of `regenerate`."""
    _check_settings(output, settings)
    size = CHUNK_BATCHES * regenerator.sampling.batch
    with output.open("ab+") as file:
        done = _whole_rows(file)
        chunks = iter(lambda: list(islice(asked, size)), [])
        begun = time.monotonic()
        tokens = 0
        for number, chunk in enumerate(chunks):
            report.used += len(chunk)
            first = number * size
            if first + len(chunk) <= done:
                continue
            if tokens == 0:  # the first line below may take many minutes
                log_event(_logger, "info", "answering", prompts=len(chunk), already_answered=first)
            if first < done:  # cut off in the middle of a chunk: a chunk is answered as a whole
                _keep_rows(file, first)
                done = first
            answers = regenerator.answer(chunk, number)
            whose = str(settings["target_fingerprint"])
            rows = [_row(regenerator, prompt, answer, whose) for prompt, answer in zip(chunk, answers, strict=True)]
            _append(file, rows)
            tokens += sum(len(answer.token_ids) for answer in answers)
            log_event(
                _logger, "info", "answered", prompts=first + len(chunk),
                tokens_per_second=round(tokens / (time.monotonic() - begun), 1),
            )  # fmt: skip


def _prompts(
    regenerator: Regenerator, files: Iterable[SourceFile], record_format: RecordFormat, report: ReportBuilder
) -> Iterator[Asked]:
    for file in files:
        try:
            for record in read_records(file, Position()):
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
        except OSError as error:
            raise unreadable(file.path, str(error.strerror or error)) from error


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


def _append(file: IO[bytes], rows: Sequence[bytes]) -> None:
    try:
        file.write(b"".join(rows))
        file.flush()
        os.fsync(file.fileno())
    except OSError as error:
        raise SlipstreamError(
            f"{file.name} cannot be written: {error.strerror}.",
            reason=Reason.DISK_FULL,
            remedy="Make room and start again: what was answered so far is kept.",
        ) from error


def _whole_rows(file: IO[bytes]) -> int:
    """Rows that were written whole; a rest behind the last line end is cut off."""
    file.seek(0)
    rows, end = 0, 0
    for line in file:
        if not line.endswith(b"\n"):
            break
        rows, end = rows + 1, end + len(line)
    file.truncate(end)
    return rows


def _keep_rows(file: IO[bytes], rows: int) -> None:
    file.seek(0)
    file.truncate(sum(len(line) for line in islice(file, rows)))


def require_writable(output: Path) -> None:
    """Asked before a model is loaded. Makes the directory of `output`.

    Raises:
        SlipstreamError: SPEC_INVALID, no file can be there; DATA_INVALID, another file is.
    """
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        why = "it is a directory" if output.is_dir() else ""
        if not why and not os.access(output if output.exists() else output.parent, os.W_OK):
            why = "writing there is not permitted"
    except OSError as error:
        why = str(error.strerror or error)
    if why:
        raise SlipstreamError(
            f"The answers cannot be written to {output}: {why}.",
            reason=Reason.SPEC_INVALID,
            remedy="Name a file in a writable directory with --to.",
        )
    if _is_begun(output) and not _beside(output).exists():
        raise SlipstreamError(
            f"{output} is there already, and holds no answers that could be gone on with: {_beside(output).name} is "
            "not beside it.",
            reason=Reason.DATA_INVALID,
            remedy="Name another --to.",
        )


def _is_begun(output: Path) -> bool:
    return output.exists() and output.stat().st_size > 0


def _check_settings(output: Path, settings: dict[str, Any]) -> None:
    require_writable(output)
    beside = _beside(output)
    if not _is_begun(output):
        beside.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        return
    before = _settings_of(output)
    differences = [key for key in sorted(before.keys() | settings.keys()) if before.get(key) != settings.get(key)]
    if differences:
        raise SlipstreamError(
            f"{output} was begun with other settings: {', '.join(differences)}.",
            reason=Reason.DATA_INVALID,
            remedy="Name another --to, or use the settings in " + beside.name + ".",
        )


def _beside(output: Path) -> Path:
    return output.with_name(output.name + ".settings.json")


def _settings_of(output: Path) -> dict[str, Any]:
    """What a file was begun with; nothing where that cannot be read."""
    try:
        settings = json.loads(_beside(output).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, dict) else {}


def _no_prompt(files: Sequence[SourceFile], report: ReportBuilder) -> SlipstreamError:
    why = "; ".join(f"dropped {entry.in_words()}" for entry in report.build("train").dropped[:2])
    return SlipstreamError(
        f"{files[0].path}: no usable prompt in {report.read} records{'; ' + why if why else ''}.",
        reason=Reason.DATA_INVALID,
        remedy='A record is for example {"prompt": "…"} or {"messages": [{"role": "user", "content": "…"}]}.',
    )
