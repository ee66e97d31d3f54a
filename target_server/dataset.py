"""Reads a recipe's conversation files into documents: allowed paths only, every line accounted for."""

import hashlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import DataSpec
from slipstream.telemetry.logs import log_event
from slipstream.wire.data_report import DataReport, Finding, ReportBuilder
from target_server.conversations import Conversation, LineFormat, read_conversations
from target_server.document_table import DocumentTable
from target_server.tokens_and_mask import ChatEncoder, Document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Split = Literal["train", "heldout"]

_PROGRESS_SECONDS = 5.0
_VERIFIED_AT_START = 16
_VERIFIED_EVERY = 512
_MIN_SAMPLES_TO_REFUSE = 4

_CORRECT_FILES = "Correct data.files in the recipe; the path must be valid on the target server's machine."

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Dataset:
    """The documents of one split, in file order."""

    documents: DocumentTable
    content_hash: str
    """sha256 (hex) over the format, and name and bytes of every file in order; says nothing of template, cut or split.

    The directory does not count. The file's name does: ids of lines without one come from it, and with them the split.
    """
    report: DataReport


def load_documents(
    data: DataSpec,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    data_roots: Sequence[Path] | None,
    split: Split,
) -> Dataset:
    """Read, render, tokenize and mask all conversations of `data` that belong to `split`.

    `data_roots`: directories that files must lie in (symbolic links followed); None allows every path.
    Raises SlipstreamError: PATH_NOT_ALLOWED; DATA_INVALID for a file that is missing, unreadable or yields no
    usable conversation, or an empty split; MODEL_INVALID for a tokenizer without offsets or chat template, or one
    whose masks do not decode to the answers.
    """
    paths = allowed_paths(data.files, data_roots)
    encoder = ChatEncoder(tokenizer, data.max_document_tokens or data.pack_tokens)
    report = ReportBuilder()
    loader = _Loader(encoder, data, split, report)
    states = [file_stamp(path) for path in paths]
    content_hash = _content_hash(paths, data.format)
    documents = DocumentTable.of(document for path in paths for document in loader.documents_of(path))
    result = report.build(split)
    if len(documents) == 0:
        raise _empty_split(data, split)
    loader.refuse_wrong_masks()
    for path, state in zip(paths, states, strict=True):
        if file_stamp(path) != state:
            raise _unreadable(path, "it changed while it was read", "Start again once nothing writes to the file.")
    log_event(
        _logger, "info", "documents_loaded", split=split, documents=len(documents), tokens=result.tokens,
        supervised=result.supervised_tokens, dropped=result.num_dropped,
    )  # fmt: skip
    return Dataset(documents, content_hash, result)


def is_heldout(conversation_id: str, fraction: float) -> bool:
    """Whether a conversation is held out: its id's sha256, read as a number in [0, 1), lies below `fraction`."""
    digest = hashlib.sha256(conversation_id.encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2.0**64


class _Loader:
    """Streams the documents of files, one after the other, into one report."""

    def __init__(self, encoder: ChatEncoder, data: DataSpec, split: Split, report: ReportBuilder) -> None:
        self._encoder = encoder
        self._format: LineFormat = data.format
        self._heldout_fraction = data.heldout_fraction
        self._split = split
        self._report = report
        self._masks_differ = 0
        self._next_progress = time.monotonic() + _PROGRESS_SECONDS

    def documents_of(self, path: Path) -> Iterator[Document]:
        """Documents of one file. Raises SlipstreamError (DATA_INVALID) if the file gives none to either split."""
        report = self._report
        kept_before = report.used + report.other_split
        read_before = report.read
        try:
            for conversation, documents in self._encoder.encode(self._of_split(path), report):
                self._verify_sample(conversation)
                yield from documents
        except OSError as error:
            raise _unreadable(path, str(error.strerror or error)) from error
        if report.used + report.other_split == kept_before:
            raise self._useless_file(path, report.read - read_before)

    def _of_split(self, path: Path) -> Iterator[Conversation]:
        for conversation in read_conversations(path, self._format, self._report):
            self._log_progress(path)
            if is_heldout(conversation.id, self._heldout_fraction) == (self._split == "heldout"):
                yield conversation
            else:
                self._report.other_split += 1

    def _log_progress(self, path: Path) -> None:
        now = time.monotonic()
        if now < self._next_progress:
            return
        self._next_progress = now + _PROGRESS_SECONDS
        report = self._report
        log_event(
            _logger, "info", "reading_conversations", file=path.name, read=report.read, used=report.used,
            tokens=report.tokens, dropped=report.num_dropped,
        )  # fmt: skip

    def _verify_sample(self, conversation: Conversation) -> None:
        report = self._report
        if report.used > _VERIFIED_AT_START and report.used % _VERIFIED_EVERY:
            return
        report.mask_samples += 1
        problem = self._encoder.mask_problem(conversation)
        if problem is not None:
            self._masks_differ += 1
            report.note(Finding.MASK_NOT_VERIFIED, conversation.where)
            log_event(_logger, "warning", "mask_not_verified", where=conversation.where, problem=problem)

    def refuse_wrong_masks(self) -> None:
        """Raise if most of the sampled masks are wrong: then it is the tokenizer, not a strange conversation."""
        samples = self._report.mask_samples
        if samples >= _MIN_SAMPLES_TO_REFUSE and self._masks_differ * 2 > samples:
            raise SlipstreamError(
                f"In {self._masks_differ} of {samples} sampled conversations the supervised tokens do not decode "
                "to the assistant's answer.",
                reason=Reason.MODEL_INVALID,
                remedy="The tokenizer's offsets or its chat template are unusual; the log shows what differs.",
            )

    def _useless_file(self, path: Path, lines: int) -> SlipstreamError:
        why = "; ".join(f"dropped {entry.in_words()}" for entry in self._report.build(self._split).dropped)
        return SlipstreamError(
            f"{path} holds no usable conversation: {lines} lines read{'; ' + why if why else ''}.",
            reason=Reason.DATA_INVALID,
            remedy='Each line must be a JSON object such as {"messages": [{"role": "user", "content": "…"}, '
            '{"role": "assistant", "content": "…"}]}, or ShareGPT `conversations`.',
        )


def allowed_paths(names: Sequence[str], data_roots: Sequence[Path] | None) -> tuple[Path, ...]:
    """The real paths of files that may be read.

    Raises:
        SlipstreamError: PATH_NOT_ALLOWED outside of `data_roots`; DATA_INVALID for a name that is no file's.
    """
    return tuple(_allowed_path(name, data_roots) for name in names)


def _allowed_path(name: str, data_roots: Sequence[Path] | None) -> Path:
    """The real path of a file. Refuses before looking whether it exists, so that nobody can probe for files."""
    try:
        path = Path(name).expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:  # no such user, a loop of links, a NUL byte
        if data_roots is not None:  # nobody can probe for users either
            raise _outside(name, data_roots) from error
        raise SlipstreamError(
            f"{name!r} is not the path of a file: {error}.", reason=Reason.DATA_INVALID, remedy=_CORRECT_FILES
        ) from error
    if data_roots is not None and not any(path.is_relative_to(root.resolve()) for root in data_roots):
        raise _outside(name, data_roots)
    try:
        found = None if path.is_file() else "is not a file" if path.exists() else "does not exist"
    except OSError as error:  # a directory on the way that may not be searched, a name that is too long
        raise _unreadable(path, str(error.strerror or error)) from error
    if found is not None:
        raise SlipstreamError(
            f"The conversation file {path} {found}.", reason=Reason.DATA_INVALID, remedy=_CORRECT_FILES
        )
    return path


def _outside(name: str, data_roots: Sequence[Path]) -> SlipstreamError:
    roots = ", ".join(str(root) for root in data_roots) or "none"
    return SlipstreamError(
        f"{name!r} lies outside the directories that this target server may read data from ({roots}).",
        reason=Reason.PATH_NOT_ALLOWED,
        remedy="Move the file there, or start the target server with --data-root for its directory.",
    )


def _empty_split(data: DataSpec, split: Split) -> SlipstreamError:
    fraction = data.heldout_fraction
    return SlipstreamError(
        f"No conversation belongs to the {split} split (data.heldout_fraction is {fraction:g}).",
        reason=Reason.DATA_INVALID,
        remedy="Lower data.heldout_fraction." if split == "train" else "Raise data.heldout_fraction.",
    )


def _unreadable(
    path: Path, why: str, remedy: str = "Check that the target server may read the file."
) -> SlipstreamError:
    return SlipstreamError(f"{path} cannot be read: {why}.", reason=Reason.DATA_INVALID, remedy=remedy)


def file_stamp(path: Path) -> tuple[int, int, int]:
    """Size in bytes, time of the last change in ns, inode.

    Raises:
        SlipstreamError: DATA_INVALID.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise _unreadable(path, str(error.strerror or error)) from error
    return status.st_size, status.st_mtime_ns, status.st_ino


def _content_hash(paths: Sequence[Path], line_format: LineFormat) -> str:
    total = hashlib.sha256(f"slipstream.dataset.v1:{line_format}".encode())
    for path in paths:
        try:
            with path.open("rb") as file:
                total.update(hashlib.sha256(path.name.encode(errors="surrogateescape")).digest())
                total.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise _unreadable(path, str(error.strerror or error)) from error
    return total.hexdigest()
