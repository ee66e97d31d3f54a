"""How many packs the epochs of a run have: from the index where there is one, else from the data's first records."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from slipstream.counted import counted
from slipstream.epoch_length import EpochLength
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import DataSpec
from target_server.data_files import file_stamp, unreadable
from target_server.dataset import default_index_root, hash_content, is_hashed_quickly
from target_server.document_index import IndexSource, find_index
from target_server.document_table import DocumentTable, encode_documents
from target_server.file_oddities import first_layout
from target_server.packing import PackSequence
from target_server.record_encoder import Block, EncodingSettings, RecordEncoder
from target_server.record_files import Position, SourceFile, read_records

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MOST_RECORDS = 4096
"""Read of all files together: some seconds."""
_LEAST_RECORDS = 64
"""Of a file."""
_MOST_FILES = 64
_BLOCK_RECORDS = 512
_MOST_PLANNED = 4_000_000
"""Documents that are packed, over all epochs: some seconds. Beyond, the first epoch stands for the others."""


@dataclass(frozen=True)
class _Sample:
    """The first records of a file."""

    documents: list[DocumentTable]
    share: float
    """Of the file."""
    is_whole: bool
    """It was read to its end."""


def measure_epochs(
    data: DataSpec, files: Sequence[SourceFile], tokenizer: "PreTrainedTokenizerBase", epochs: int
) -> EpochLength:
    """Packs of so many epochs of the train split.

    Raises:
        SlipstreamError: DATA_INVALID for a file that cannot be read, or no usable record among those that were.
    """
    settings = EncodingSettings.of(data, "train")
    if is_hashed_quickly(files):
        source = IndexSource(files, hash_content(files, data), tokenizer, settings)
        table = find_index(default_index_root(), source)
        if table is not None:
            return _length(table, data, epochs, f"the index of {counted(len(table), 'document')}")
    picked = [files[number * len(files) // _MOST_FILES] for number in range(_MOST_FILES)]
    picked = picked if len(files) > _MOST_FILES else list(files)
    limit = max(_LEAST_RECORDS, _MOST_RECORDS // len(picked))
    encoder = RecordEncoder(tokenizer, settings)
    samples = [_sample(encoder, number, file, limit) for number, file in enumerate(picked)]
    tables = [table for sample in samples for table in sample.documents]
    if not tables:
        raise SlipstreamError(
            f"no record is usable among the first {limit:,} of each file",
            reason=Reason.DATA_INVALID,
            remedy="`slipstream data inspect` says why.",
        )
    table = DocumentTable(encode_documents([(document, 0, 0) for each in tables for document in each]))
    if len(picked) == len(files) and all(sample.is_whole for sample in samples):
        return _length(table, data, epochs, "the only document" if len(table) == 1 else f"all {len(table):,} documents")
    # Of a file what its sample says, of files that were not opened what the others say.
    sizes = [file_stamp(file.path).size for file in picked]
    tokens = sum(
        sum(each.num_tokens for each in sample.documents) / sample.share for sample in samples if sample.share > 0
    )
    tokens *= sum(file_stamp(file.path).size for file in files) / max(1, sum(sizes))
    packs = round(_length(table, data, 1, "").packs * tokens / table.num_tokens)
    words = f"the first {limit:,} records of {'each file' if len(picked) == len(files) else f'{len(picked)} files'}"
    return EpochLength(epochs=epochs, packs=max(1, packs) * epochs, exact=False, source=f"estimated from {words}")


def _length(table: DocumentTable, data: DataSpec, epochs: int, words: str) -> EpochLength:
    sequence = PackSequence(table, pack_tokens=data.pack_tokens, seed=data.seed, window_documents=data.window_documents)
    planned = max(1, min(epochs, _MOST_PLANNED // len(table)))
    packs = sequence.total_packs(planned) * epochs // planned
    exact = planned == epochs
    source = f"{'counted' if exact else 'estimated'} from {words}"
    return EpochLength(epochs=epochs, packs=packs, exact=exact, source=source)


def _sample(encoder: RecordEncoder, number: int, file: SourceFile, limit: int) -> _Sample:
    tables, read, offset = [], 0, 0
    try:
        layout = first_layout(file)
        records = read_records(file, Position())
        while block := list(islice(records, min(_BLOCK_RECORDS, limit - read))):
            encoded = encoder.encode(Block(number, file.printable_name, block, layout))
            if len(encoded.documents.rows):
                tables.append(DocumentTable(encoded.documents))
            read, offset = read + len(block), block[-1].position.offset
        size = file_stamp(file.path).size
        # All bytes may lie in a buffer already, of gzip or of an array: the records that are left there are few.
        left = sum(1 for _ in records) if offset >= size else int(next(records, None) is not None)
    except OSError as error:
        raise unreadable(file.path, str(error.strerror or error)) from error
    if not left:
        return _Sample(tables, 1.0, is_whole=True)
    return _Sample(tables, offset / size if offset < size else read / (read + left), is_whole=False)
