"""What `target-server inspect` writes and `slipstream data inspect` shows. No torch here."""

from pydantic import BaseModel, ConfigDict

from slipstream.wire.data_report import DataReport


class Part(BaseModel):
    """Base of what an inspection is made of."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Token(Part):
    """One token of a document."""

    id: int
    text: str
    """Decoded alone; pieces of a character give replacement characters."""
    supervised: bool
    special: bool


class InspectedDocument(Part):
    """A row of tokens."""

    number: int
    """From 1, among the documents that were inspected."""
    id: str
    where: str
    """`file.jsonl:17`."""
    tokens: tuple[Token, ...]


class Lengths(Part):
    """How long documents are, in tokens."""

    shortest: int
    mean: float
    median: int
    percentile_90: int
    percentile_99: int
    longest: int
    histogram: tuple[tuple[int, int], ...]
    """(upper bound, documents): longer than the bound before, at most this one."""


class InspectedSource(Part):
    """One file."""

    name: str
    path: str
    size_bytes: int
    complete: bool
    """False where the limit ended before the file did."""
    report: DataReport
    lengths: Lengths | None
    """None where no document came out."""


class Inspection(Part):
    """What became of the first records of every file."""

    model: str
    remarks: tuple[str, ...] = ()
    """What will make a run fail although its data is good."""
    limit: int
    """Records of each file that were looked at, at most."""
    max_document_tokens: int
    pack_tokens: int
    packs: int
    """That one epoch of these documents fills."""
    filled: float
    """Share of their slots that hold tokens."""
    sources: tuple[InspectedSource, ...]
    report: DataReport
    """Of all files together."""
    lengths: Lengths | None
    documents: tuple[InspectedDocument, ...]
    """The one that was asked for."""
