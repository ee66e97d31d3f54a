"""A recipe's data becomes a table of documents: hashed, indexed on disk once, mapped from then on."""

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.run_spec.spec import DataSpec
from slipstream.telemetry.logs import log_event
from slipstream.wire.data_report import DataReport
from target_server.data_files import FileStamp, file_stamp, unreadable
from target_server.document_index import IndexSource, open_index
from target_server.document_table import DocumentTable
from target_server.record_encoder import EncodingSettings, Split
from target_server.record_files import SourceFile

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PARALLEL_FROM_BYTES = 256 * 2**20
"""Below, worker processes cost more time than they save."""
_MOST_JOBS = 8
_MEMORY, _MEMORY_OF_PROCESS, _MEMORY_OF_JOB, _MEMORY_PER_GIB = 2048, 350, 150, 12
"""MiB. Unless more jobs are asked for, an index is built within the first. Measured with SmolLM2's tokenizer: 330 MiB
without workers, 125 a worker, 11 a GB of conversations of 1.4 kB."""
_SETTLED_NS = 2_000_000_000
"""A file that changed less long ago may change again within one tick of the clock, unseen."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Dataset:
    """The documents of one split, in file order."""

    documents: DocumentTable
    content_hash: str
    """sha256 (hex) over what is read from records (format, trained turns), and name and bytes of every file in order;
    says nothing of template, cut or split.

    The directory does not count. The file's name does: ids of records without one come from it, and with them the
    split.
    """
    report: DataReport


def load_documents(
    data: DataSpec,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    files: Sequence[SourceFile],
    split: Split,
    jobs: int | None = None,
) -> Dataset:
    """All documents of `files` that belong to `split`; from the index where there is one, else it is built first.

    Args:
        data: how records are read, cut and split.
        tokenizer: the target's.
        files: what `data.files` name, see `data_files.find_files`.
        split: train or heldout.
        jobs: processes that tokenize where there is no index yet; default: by size and cores.

    Raises:
        SlipstreamError: DATA_INVALID for a file that cannot be read or changes meanwhile, or when nothing is usable;
            MODEL_INVALID for a tokenizer without offsets or chat template, or one whose masks do not decode to the
            answers; ENVIRONMENT_UNSUPPORTED without the package that reads a file; DISK_FULL.
    """
    root = default_index_root()
    stamps = [file_stamp(file.path) for file in files]
    content_hash = hash_content(files, data)
    source = IndexSource(files, content_hash, tokenizer, EncodingSettings.of(data, split))
    documents, report = _open(root, source, jobs or _jobs(sum(stamp.size for stamp in stamps)))
    for file, stamp in zip(files, stamps, strict=True):
        if file_stamp(file.path) != stamp:
            shutil.rmtree(root / source.key, ignore_errors=True)  # it is not what its key says
            raise unreadable(file.path, "it changed while it was read", "Start again once nothing writes to the file.")
    log_event(
        _logger, "info", "documents_loaded", split=split, documents=len(documents), tokens=report.tokens,
        supervised=report.supervised_tokens, dropped=report.num_dropped,
    )  # fmt: skip
    return Dataset(documents, content_hash, report)


def default_index_root() -> Path:
    """`$SLIPSTREAM_INDEX_DIR`, else `slipstream/documents` in the user's cache directory."""
    given = os.environ.get("SLIPSTREAM_INDEX_DIR")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slipstream" / "documents"


def _open(root: Path, source: IndexSource, jobs: int) -> tuple[DocumentTable, DataReport]:
    try:
        root.mkdir(parents=True, exist_ok=True)
        writable = os.access(root, os.W_OK)
    except OSError:
        writable = False
    if writable:
        return open_index(root, source, jobs=jobs)
    log_event(
        _logger, "warning", "index_not_kept", directory=str(root),
        remedy="it is built again at the next start; name a writable directory in $SLIPSTREAM_INDEX_DIR",
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="slipstream-documents-") as directory:
        return open_index(Path(directory), source, jobs=jobs)  # what is mapped outlives its name


def _jobs(size_bytes: int) -> int:
    """One process for small data, else one a core, as far as memory allows."""
    if size_bytes < _PARALLEL_FROM_BYTES:
        return 1
    left = _MEMORY - _MEMORY_OF_PROCESS - _MEMORY_PER_GIB * size_bytes / 2**30
    return max(1, min(_MOST_JOBS, len(os.sched_getaffinity(0)), int(left / _MEMORY_OF_JOB)))


def hash_content(files: Sequence[SourceFile], data: DataSpec) -> str:
    """`Dataset.content_hash`. Raises SlipstreamError (DATA_INVALID) for a file that cannot be read."""
    reading = [data.format, data.train_turns]
    total = hashlib.sha256(f"slipstream.dataset.v2:{json.dumps(reading)}".encode())
    for file in files:
        total.update(hashlib.sha256(file.name.encode(errors="surrogateescape")).digest())
        total.update(_file_hash(file.path, default_index_root() / "hashes"))
    return total.hexdigest()


def is_hashed_quickly(files: Sequence[SourceFile]) -> bool:
    """Whether `hash_content` takes a second and not minutes: it knows the large files already."""
    known = default_index_root() / "hashes"
    unknown = [stamp.size for file in files if _remembered(file.path, stamp := file_stamp(file.path), known) is None]
    return sum(unknown) <= _PARALLEL_FROM_BYTES


def _file_hash(path: Path, known: Path) -> bytes:
    """sha256 of a file. Remembered with the file's stamp, as a hundred gigabytes take minutes to read."""
    stamp = file_stamp(path)
    saved = _remembered(path, stamp, known)
    if saved is not None:
        return saved
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
    except OSError as error:
        raise unreadable(path, str(error.strerror or error)) from error
    if time.time_ns() - stamp.mtime_ns > _SETTLED_NS and file_stamp(path) == stamp:
        _remember(_note(path, known), {"stamp": asdict(stamp), "sha256": digest.hexdigest()})
    return digest.digest()


def _note(path: Path, known: Path) -> Path:
    return known / hashlib.sha256(os.fsencode(path)).hexdigest()[:32]


def _remembered(path: Path, stamp: FileStamp, known: Path) -> bytes | None:
    try:
        saved = json.loads(_note(path, known).read_text(encoding="utf-8"))
        return bytes.fromhex(saved["sha256"]) if saved["stamp"] == asdict(stamp) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not known yet, or no note of ours


def _remember(note: Path, content: dict[str, object]) -> None:
    beside = note.with_name(f"{note.name}.{os.getpid()}")
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps(content), encoding="utf-8")
        beside.replace(note)
    except OSError as error:
        log_event(_logger, "warning", "hash_not_kept", file=str(note), error=str(error.strerror or error))
