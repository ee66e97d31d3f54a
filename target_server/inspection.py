"""Looks at the first records of every file: what became of them, how long they are, which tokens are supervised."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from slipstream.data_inspection import InspectedDocument, InspectedSource, Inspection, Lengths, Token
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import DataSpec
from slipstream.wire.data_report import ReportBuilder
from target_server.data_files import unreadable
from target_server.document_index import note_duplicates
from target_server.document_table import DocumentTable, encode_documents
from target_server.file_oddities import first_layout, oddities
from target_server.packing import PackSequence
from target_server.record_encoder import Block, EncodingSettings, RecordEncoder
from target_server.record_files import Position, SourceFile, read_records
from target_server.tokens_and_mask import Document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BLOCK_RECORDS = 512


def inspect_files(
    data: DataSpec,
    files: Sequence[SourceFile],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    model: str,
    limit: int,
    document: int,
) -> Inspection:
    """Encode the first `limit` records of every file as the target server would for the train split.

    Args:
        data: how records are read, cut and split.
        files: what `data.files` name.
        tokenizer: the target's.
        model: its name, for the reader.
        limit: records of each file.
        document: number (from 1) of the document whose tokens are shown.

    Raises:
        SlipstreamError: DATA_INVALID for a file that cannot be read, or a document that is not there; MODEL_INVALID.
    """
    encoder = RecordEncoder(tokenizer, EncodingSettings.of(data, "train"))
    sources, tables = [], []
    for number, file in enumerate(files):
        source, documents = _inspect_file(encoder, number, file, limit)
        sources.append(source)
        tables += documents
    total = ReportBuilder()
    for source in sources:
        total.add(source.report)
    if tables:
        hashes, places = (
            np.concatenate([getattr(table, name) for table in tables]) for name in ("id_hashes", "places")
        )
        note_duplicates(hashes, places, total, files)
    lengths = _document_lengths(tables)
    packs, filled = _packing(tables, data)
    return Inspection(
        model=model,
        limit=limit,
        max_document_tokens=data.max_document_tokens or data.pack_tokens,
        pack_tokens=data.pack_tokens,
        packs=packs,
        filled=filled,
        sources=tuple(sources),
        report=total.build("train"),
        lengths=_lengths(lengths),
        documents=tuple(_shown(tables, document, files, tokenizer)),
    )


def _inspect_file(
    encoder: RecordEncoder, number: int, file: SourceFile, limit: int
) -> tuple[InspectedSource, list[DocumentTable]]:
    report, tables, complete = ReportBuilder(), [], True
    try:
        for finding, where in oddities(file):
            report.note(finding, where)
        layout = first_layout(file)
        records = read_records(file, Position())
        while block := list(islice(records, min(_BLOCK_RECORDS, limit - report.read))):
            encoded = encoder.encode(Block(number, file.printable_name, block, layout))
            report.add(encoded.report)
            if len(encoded.documents.rows):
                tables.append(DocumentTable(encoded.documents))
        complete = next(records, None) is None
    except OSError as error:
        raise unreadable(file.path, str(error.strerror or error)) from error
    source = InspectedSource(
        name=file.printable_name,
        path=str(file.path),
        size_bytes=file.path.stat().st_size,
        complete=complete,
        report=report.build("train"),
        lengths=_lengths(_document_lengths(tables)),
    )
    return source, tables


def _document_lengths(tables: Sequence[DocumentTable]) -> npt.NDArray[np.int32]:
    return np.concatenate([table.lengths for table in tables]) if tables else np.empty(0, dtype=np.int32)


def _lengths(lengths: npt.NDArray[np.int32]) -> Lengths | None:
    if len(lengths) == 0:
        return None
    median, percentile_90, percentile_99 = np.percentile(lengths, (50, 90, 99), method="inverted_cdf").tolist()
    longest = int(lengths.max())
    bounds = [32]
    while bounds[-1] < longest:
        bounds.append(bounds[-1] * 2)
    counts = np.bincount(np.searchsorted(bounds, lengths), minlength=len(bounds))
    return Lengths(
        shortest=int(lengths.min()),
        mean=float(lengths.mean()),
        median=int(median),
        percentile_90=int(percentile_90),
        percentile_99=int(percentile_99),
        longest=longest,
        histogram=tuple(zip(bounds, counts.tolist(), strict=True)),
    )


def _packing(tables: Sequence[DocumentTable], data: DataSpec) -> tuple[int, float]:
    """How many packs an epoch has, and how full they are."""
    if not tables:
        return 0, 0.0
    sequence = PackSequence(
        _joined(tables), pack_tokens=data.pack_tokens, seed=data.seed, window_documents=data.window_documents
    )
    packs = sequence.total_packs(1)
    return packs, sum(table.num_tokens for table in tables) / (packs * data.pack_tokens)


def _joined(tables: Sequence[DocumentTable]) -> DocumentTable:
    """One table of all documents; only lengths are looked at."""
    return DocumentTable(encode_documents([(document, 0, 0) for table in tables for document in table]))


def _shown(
    tables: Sequence[DocumentTable], number: int, files: Sequence[SourceFile], tokenizer: "PreTrainedTokenizerBase"
) -> Iterator[InspectedDocument]:
    if not tables:
        return
    index = number - 1
    for table in tables:
        if index < len(table):
            file, record = table.place(index)
            where = f"{files[file].printable_name}:{record}"
            yield _inspected(table[index], number, where, tokenizer)
            return
        index -= len(table)
    raise SlipstreamError(
        f"There is no document {number}: {sum(map(len, tables))} were inspected.",
        reason=Reason.DATA_INVALID,
        remedy="Count from 1, or raise --limit.",
    )


def _inspected(document: Document, number: int, where: str, tokenizer: "PreTrainedTokenizerBase") -> InspectedDocument:
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    ids = document.token_ids.tolist()
    texts = tokenizer.batch_decode(
        [[token] for token in ids], skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return InspectedDocument(
        number=number,
        id=document.id,
        where=where,
        tokens=tuple(
            Token(id=token, text=text, supervised=bool(supervised), special=token in special)
            for token, text, supervised in zip(ids, texts, document.loss_mask.tolist(), strict=True)
        ),
    )
