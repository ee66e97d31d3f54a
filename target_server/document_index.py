"""③ The documents of a data set on disk: built once, resumed where it was broken off, then only mapped.

    ROOT/KEY.lock       held while building: a second process waits and then uses what the first has built
    ROOT/KEY.building/  the files of `document_table.py`, and progress.json: up to where they are good
    ROOT/KEY/           the same, complete, with index.json: what it was built from, and the report

KEY is a hash of the data's content, the tokenizer with its template, and the settings. A process that is killed leaves
at most bytes behind the ends that progress.json names; the next one cuts them off and goes on from there.
"""

import fcntl
import hashlib
import json
import logging
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from slipstream.counted import counted
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.telemetry.logs import log_event
from slipstream.wire.data_report import DataReport, Finding, ReportBuilder
from target_server.data_files import unreadable
from target_server.document_table import (
    COLUMNS,
    DOCUMENTS_FILE,
    ID_HASH,
    PLACE,
    ROW_TYPE,
    DocumentTable,
    split_place,
)
from target_server.file_oddities import first_layout, oddities
from target_server.index_writer import IndexWriter, Progress, file_sizes, write_atomically
from target_server.record_encoder import Block, EncodingSettings, encode_blocks
from target_server.record_files import Position, Record, SourceFile, read_records

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FORMAT = "slipstream.documents.v1"
_PROGRESS_SECONDS = 5.0
_BLOCK_RECORDS = 512
_BLOCK_BYTES = 4 * 2**20
_PIECE_DOCUMENTS = 2**20
_MIN_SAMPLES_TO_REFUSE = 4

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class IndexSource:
    """Everything that an index is a function of."""

    files: Sequence[SourceFile]
    content_hash: str
    tokenizer: "PreTrainedTokenizerBase"
    settings: EncodingSettings

    @property
    def key(self) -> str:
        """Names the index."""
        identity = [_FORMAT, self.content_hash, tokenizer_hash(self.tokenizer), asdict(self.settings)]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]


def tokenizer_hash(tokenizer: "PreTrainedTokenizerBase") -> str:
    """sha256 over all that decides which tokens a conversation becomes: tokenizer, chat template, library versions."""
    parts = [
        version("transformers"),
        version("tokenizers"),
        tokenizer.backend_tokenizer.to_str(),
        tokenizer.chat_template,
        {name: str(value) for name, value in tokenizer.special_tokens_map.items()},
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def open_index(root: Path, source: IndexSource, *, jobs: int = 1) -> tuple[DocumentTable, DataReport]:
    """The documents of a source and their report; built first where there is no index yet.

    Args:
        root: directory of all indexes; created if missing.
        source: what to index.
        jobs: processes that tokenize.

    Raises:
        SlipstreamError: DATA_INVALID when nothing is usable or a file cannot be read; MODEL_INVALID for a tokenizer
            that cannot be used, or whose masks do not decode to the answers; DISK_FULL.
        OSError: `root` cannot be written.
    """
    directory = root / source.key
    root.mkdir(parents=True, exist_ok=True)
    report = _published_report(directory)
    if report is None:
        with _lock(root / f"{source.key}.lock"):
            report = _published_report(directory)
            if report is None:
                report = _build(directory, source, jobs)
    return DocumentTable.open(directory), report


def find_index(root: Path, source: IndexSource) -> DocumentTable | None:
    """The documents of a source if they are indexed already."""
    directory = root / source.key
    return None if _published_report(directory) is None else DocumentTable.open(directory)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """The kernel lets go of it when its holder dies, however that happens."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log_event(_logger, "info", "index_built_elsewhere", waiting_for=str(path))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _published_report(directory: Path) -> DataReport | None:
    """The report of a complete index; None where there is none, or its files are not as long as they were."""
    try:
        progress = Progress.model_validate_json((directory / "index.json").read_bytes())
    except FileNotFoundError:
        return None
    sizes = {name: (directory / name).stat().st_size for name in file_sizes(progress) if (directory / name).exists()}
    if sizes != file_sizes(progress):
        log_event(_logger, "warning", "index_damaged", directory=str(directory), remedy="it is built again")
        return None
    return progress.report


def _build(directory: Path, source: IndexSource, jobs: int) -> DataReport:
    unfinished = directory.with_name(directory.name + ".building")
    shutil.rmtree(directory, ignore_errors=True)  # damaged
    unfinished.mkdir(exist_ok=True)
    with IndexWriter(unfinished, source.settings.split) as writer:
        _fill(writer, source, jobs)
        progress = _finished(writer.commit(), unfinished, source)
    write_atomically(unfinished / "index.json", progress.model_dump_json())
    (unfinished / "progress.json").unlink()
    unfinished.rename(directory)
    log_event(
        _logger, "info", "index_built", directory=str(directory), documents=progress.documents, tokens=progress.tokens
    )
    return progress.report


def _fill(writer: IndexWriter, source: IndexSource, jobs: int) -> None:
    begun = writer.progress
    pace = _Pace(source.files, begun)
    blocks = _blocks(source.files, begun)
    for block, encoded in encode_blocks(blocks, source.tokenizer, source.settings, jobs=jobs):
        writer.next_file(block.file, source.files)
        writer.append(block, encoded.documents, encoded.report)
        pace.report(block, writer.report)
        if writer.commit_is_due():
            refuse_wrong_masks(writer.commit().report)
    writer.next_file(len(source.files), source.files)


def _blocks(files: Sequence[SourceFile], begun: Progress) -> Iterator[Block]:
    for number in range(begun.file, len(files)):
        start = Position(begun.record, begun.offset) if number == begun.file else Position()
        file = files[number]
        records: list[Record] = []
        read_from = start.offset
        try:
            layout = first_layout(file)
            for record in read_records(file, start):
                records.append(record)
                if len(records) >= _BLOCK_RECORDS or record.position.offset - read_from >= _BLOCK_BYTES:
                    yield Block(number, file.printable_name, records, layout)
                    records, read_from = [], record.position.offset
        except OSError as error:
            raise unreadable(file.path, str(error.strerror or error)) from error
        if records:
            yield Block(number, file.printable_name, records, layout)


def _finished(progress: Progress, directory: Path, source: IndexSource) -> Progress:
    """The last account; refuses what nobody could train on."""
    report = progress.report
    if report.used + report.other_split == 0:
        raise _nothing_usable(source.files, report)
    if progress.documents == 0:
        raise _empty_split(source.settings)
    refuse_wrong_masks(report)
    total = ReportBuilder()
    total.add(report)
    for file in source.files:
        for finding, where in oddities(file):
            total.note(finding, where)
    _note_duplicates(directory, total, source.files)
    return progress.model_copy(update={"report": total.build(source.settings.split)})


def _note_duplicates(directory: Path, report: ReportBuilder, files: Sequence[SourceFile]) -> None:
    rows = np.memmap(directory / DOCUMENTS_FILE, dtype=ROW_TYPE, mode="r").reshape(-1, COLUMNS)
    note_duplicates(_id_hashes(directory / DOCUMENTS_FILE), rows[:, PLACE], report, files)


def note_duplicates(
    identities: npt.NDArray[np.int64],
    places: npt.NDArray[np.int64],
    report: ReportBuilder,
    files: Sequence[SourceFile],
) -> None:
    """Note conversations whose id an earlier one has.

    Args:
        identities: `[documents]`, hashes of ids.
        places: `[documents]`, where each document comes from; may be mapped from a file.
        report: gets the notes.
        files: that the places number.
    """
    order = np.argsort(identities, kind="stable")
    identities = identities[order]
    same = np.flatnonzero(identities[1:] == identities[:-1])
    later = places[order[same + 1]]
    # Rows of one conversation share its id and its place.
    for place in np.sort(later[later != places[order[same]]]).tolist():
        file, record = split_place(place)
        report.note(Finding.DUPLICATE_ID, f"{files[file].printable_name}:{record}")


def _id_hashes(path: Path) -> npt.NDArray[np.int64]:
    """[documents], read in pieces: a mapped file would count as memory, all four columns of it."""
    hashes = np.empty(path.stat().st_size // (COLUMNS * ROW_TYPE.itemsize), dtype=ROW_TYPE)
    with path.open("rb") as file:
        for begin in range(0, len(hashes), _PIECE_DOCUMENTS):
            piece = np.fromfile(file, dtype=ROW_TYPE, count=_PIECE_DOCUMENTS * COLUMNS)
            hashes[begin : begin + _PIECE_DOCUMENTS] = piece.reshape(-1, COLUMNS)[:, ID_HASH]
    return hashes


def refuse_wrong_masks(report: DataReport) -> None:
    """Some oddities of Unicode cannot be decoded exactly, but they must be the exception.

    Raises:
        SlipstreamError: MODEL_INVALID.
    """
    wrong, checked = report.count(Finding.MASK_NOT_VERIFIED), report.mask_samples
    if checked < _MIN_SAMPLES_TO_REFUSE or wrong * 2 <= checked:
        return
    examples = next(entry.examples for entry in report.notes if entry.finding is Finding.MASK_NOT_VERIFIED)
    raise SlipstreamError(
        f"Of {wrong} in {checked} conversations, the supervised tokens do not decode to the answers "
        f"({', '.join(examples)}), so this tokenizer's loss masks cannot be trusted.",
        reason=Reason.MODEL_INVALID,
        remedy="Check that tokenizer and chat template belong to the model.",
    )


class _Pace:
    """Says now and then how far a build is and when it will be done."""

    def __init__(self, files: Sequence[SourceFile], begun: Progress) -> None:
        self._before = [0]
        for file in files:
            self._before.append(self._before[-1] + file.path.stat().st_size)
        self._files = files
        self._begun_bytes = self._before[begun.file] + begun.offset
        self._begun = time.monotonic()
        self._next = self._begun + _PROGRESS_SECONDS

    def report(self, block: Block, report: ReportBuilder) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _PROGRESS_SECONDS
        done, total = self._before[block.file] + block.end.offset, max(1, self._before[-1])
        speed = (done - self._begun_bytes) / (now - self._begun)
        log_event(
            _logger, "info", "building_index", file=self._files[block.file].printable_name, done=f"{done / total:.1%}",
            mb_per_second=round(speed / 1e6, 1), minutes_left=round((total - done) / max(speed, 1.0) / 60, 1),
            read=report.read, used=report.used, tokens=report.tokens, dropped=report.num_dropped,
        )  # fmt: skip


def _nothing_usable(files: Sequence[SourceFile], report: DataReport) -> SlipstreamError:
    why = "; ".join(f"dropped {entry.in_words()}" for entry in report.dropped[:2])
    named = ", ".join(str(file.path) for file in files[:3]) + (", …" if len(files) > 3 else "")
    return SlipstreamError(
        f"{named}: no usable conversation in {counted(report.read, 'record')}{'; ' + why if why else ''}.",
        reason=Reason.DATA_INVALID,
        remedy='A record is a JSON object such as {"messages": [{"role": "user", "content": "…"}, '
        '{"role": "assistant", "content": "…"}]}; docs/data.md lists the others.',
    )


def _empty_split(settings: EncodingSettings) -> SlipstreamError:
    return SlipstreamError(
        f"No conversation belongs to the {settings.split} split (data.heldout_fraction is "
        f"{settings.heldout_fraction:g}).",
        reason=Reason.DATA_INVALID,
        remedy="Lower data.heldout_fraction." if settings.split == "train" else "Raise data.heldout_fraction.",
    )
