"""Writes an index of documents, and knows at any time up to where its files are good."""

import errno
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from pydantic import BaseModel, ConfigDict

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.telemetry.logs import log_event
from slipstream.wire.data_report import DataReport, Finding, ReportBuilder
from target_server.document_table import (
    COLUMNS,
    DOCUMENTS_FILE,
    ID_END,
    IDS_FILE,
    ROW_TYPE,
    TOKEN_TYPE,
    TOKENS_END,
    TOKENS_FILE,
    EncodedDocuments,
)
from target_server.record_encoder import Block, Split
from target_server.record_files import SourceFile

COMMIT_BYTES = 64 * 2**20
_COMMIT_SECONDS = 10.0

_logger = logging.getLogger(__name__)


class Progress(BaseModel):
    """How far a build has come."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    report: DataReport
    file: int = 0
    """The file that is read."""
    record: int = 0
    offset: int = 0
    kept_before: int = 0
    """Conversations of earlier files that belong to either split."""
    documents: int = 0
    tokens: int = 0
    id_bytes: int = 0


class IndexWriter:
    """Appends to the files of an index, from where an earlier process had come."""

    def __init__(self, directory: Path, split: Split) -> None:
        self._directory = directory
        self._split = split
        self._open_files = ExitStack()
        try:
            saved = (directory / "progress.json").read_bytes()
            self.progress = Progress.model_validate_json(saved)
            log_event(_logger, "info", "index_resumed", documents=self.progress.documents, tokens=self.progress.tokens)
        except FileNotFoundError:
            self.progress = Progress(report=ReportBuilder().build(split))
        self.report = ReportBuilder()
        self.report.add(self.progress.report)
        self._uncommitted = 0
        self._committed_at = time.monotonic()

    def __enter__(self) -> "IndexWriter":
        self._files = {name: self._opened(name, size) for name, size in file_sizes(self.progress).items()}
        return self

    def _opened(self, name: str, size: int) -> IO[bytes]:
        path = self._directory / name
        path.touch()
        file = self._open_files.enter_context(path.open("r+b"))
        file.truncate(size)
        file.seek(size)
        return file

    def __exit__(self, *_: object) -> None:
        with _disk_full_in_words(self._directory):
            self._open_files.close()

    def next_file(self, number: int, files: Sequence[SourceFile]) -> None:
        """Note the files up to `number` that gave nothing."""
        while self.progress.file < number:
            kept = self.report.used + self.report.other_split
            if kept == self.progress.kept_before:
                self.report.note(Finding.FILE_GAVE_NOTHING, files[self.progress.file].printable_name)
            self.progress = self.progress.model_copy(
                update={"file": self.progress.file + 1, "record": 0, "offset": 0, "kept_before": kept}
            )

    def append(self, block: Block, documents: EncodedDocuments, report: DataReport) -> None:
        """Write a block's documents; they count from the next commit on."""
        self.report.add(report)
        rows = documents.rows.copy()
        rows[:, TOKENS_END] += self.progress.tokens
        rows[:, ID_END] += self.progress.id_bytes
        with _disk_full_in_words(self._directory):
            self._files[TOKENS_FILE].write(documents.tokens.data)
            self._files[IDS_FILE].write(documents.ids)
            self._files[DOCUMENTS_FILE].write(rows.tobytes())
        self.progress = self.progress.model_copy(
            update={
                "record": block.end.record,
                "offset": block.end.offset,
                "documents": self.progress.documents + len(rows),
                "tokens": self.progress.tokens + len(documents.tokens),
                "id_bytes": self.progress.id_bytes + len(documents.ids),
            }
        )
        self._uncommitted += documents.tokens.nbytes

    def commit_is_due(self) -> bool:
        """Whether as much was written, or so much time went by, as may be lost."""
        waited = time.monotonic() - self._committed_at
        return self._uncommitted >= COMMIT_BYTES or waited >= _COMMIT_SECONDS

    def commit(self) -> Progress:
        """Make what was written last; returns how far it goes."""
        self.progress = self.progress.model_copy(update={"report": self.report.build(self._split)})
        with _disk_full_in_words(self._directory):
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())
            write_atomically(self._directory / "progress.json", self.progress.model_dump_json())
        self._uncommitted, self._committed_at = 0, time.monotonic()
        return self.progress


def file_sizes(progress: Progress) -> dict[str, int]:
    """Bytes that are good, by file."""
    return {
        TOKENS_FILE: progress.tokens * TOKEN_TYPE.itemsize,
        IDS_FILE: progress.id_bytes,
        DOCUMENTS_FILE: progress.documents * COLUMNS * ROW_TYPE.itemsize,
    }


@contextmanager
def _disk_full_in_words(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise SlipstreamError(
            f"The disk of {directory} is full.",
            reason=Reason.DISK_FULL,
            remedy="Make room and start again: what was built is kept. $SLIPSTREAM_INDEX_DIR names another place.",
        ) from error


def write_atomically(path: Path, text: str) -> None:
    """The old content or the new one, whatever happens."""
    beside = path.with_name(path.name + ".new")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
