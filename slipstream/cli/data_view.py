"""An inspection of data as text for a terminal: sources, drops, lengths, and one document's tokens in colour."""

from collections.abc import Iterable, Iterator
from itertools import groupby

from rich.text import Text

from slipstream.counted import counted
from slipstream.data_inspection import InspectedDocument, InspectedSource, Inspection, Lengths, Token

_FEW_TOKENS = 400
_BAR_WIDTH = 40
_BESIDE = 24
"""Tokens shown before the first supervised one, where not all of a document is shown."""


def inspection_view(inspection: Inspection, *, whole: bool, colour: bool) -> Iterator[Text]:
    """Lines to print.

    Args:
        inspection: what the target server found.
        whole: show all tokens of the document.
        colour: False marks supervised tokens with brackets, for pipes and files.
    """
    yield Text.assemble(("tokenizer  ", "bold"), inspection.model)
    for remark in inspection.remarks:
        yield Text(f"  note: {remark}", "yellow")
    for source in inspection.sources:
        yield Text()
        yield from _source(source)
    if len(inspection.sources) > 1:
        yield Text("\nall files", "bold")
        yield from _report_lines(inspection.report.summary_lines())
    if inspection.lengths is not None:
        yield Text()
        yield from _lengths(inspection.lengths, inspection.max_document_tokens)
        packs = f"{counted(inspection.packs, 'pack')} of {inspection.pack_tokens:,} tokens"
        yield Text(f"  {packs} an epoch, {inspection.filled:.1%} filled")
    for document in inspection.documents:
        yield Text()
        yield from _document(document, whole=whole, colour=colour)


def _source(source: InspectedSource) -> Iterator[Text]:
    read = "all of it" if source.complete else f"its first {counted(source.report.read, 'record')}"
    yield Text.assemble((source.name, "bold"), f"  {_size(source.size_bytes)}, {read}")
    yield from _report_lines(source.report.summary_lines())


def _size(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 100_000 else counted(size, "byte")


def _report_lines(lines: Iterable[str]) -> Iterator[Text]:
    for line in lines:
        yield Text(f"  {line}", "red" if line.startswith("dropped") else "yellow" if line.startswith("note") else "")


def _lengths(lengths: Lengths, limit: int) -> Iterator[Text]:
    yield Text.assemble(
        ("tokens of a document", "bold"),
        f"  shortest {lengths.shortest:,}, median {lengths.median:,}, mean {lengths.mean:,.0f}, "
        f"90 % up to {lengths.percentile_90:,}, 99 % up to {lengths.percentile_99:,}, longest {lengths.longest:,}; "
        f"cut at {limit:,}",
    )
    most = max(count for _, count in lengths.histogram)
    for bound, count in lengths.histogram:
        bar = "█" * max(round(_BAR_WIDTH * count / most), 1 if count else 0)
        yield Text.assemble(f"  ≤ {bound:>7,} {count:>10,} ", (bar, "cyan"))


def _document(document: InspectedDocument, *, whole: bool, colour: bool) -> Iterator[Text]:
    supervised = sum(token.supervised for token in document.tokens)
    # A record without an id of its own has its place for one.
    name = document.id if document.id == document.where else f"{document.id} ({document.where})"
    yield Text.assemble(
        (f"document {document.number}", "bold"),
        f"  {name}: {counted(len(document.tokens), 'token')}, {supervised:,} supervised",
    )
    marked = ("supervised", "black on green") if colour else ("⟦supervised⟧", "")
    yield Text.assemble("  ", marked, ", ", ("special", "bold magenta"), ", ↵ and → stand for line ends and tabs")
    tokens, before, after = _cut(document.tokens, whole=whole)
    if before:
        yield Text(f"  … {counted(before, 'token')} before …", "dim")
    yield _tokens(tokens, colour=colour)
    if after:
        yield Text(f"  … {counted(after, 'more token')}; --document {document.number} shows all", "dim")


def _cut(tokens: tuple[Token, ...], *, whole: bool) -> tuple[tuple[Token, ...], int, int]:
    """The tokens to show, and how many are left out before and behind."""
    if whole or len(tokens) <= _FEW_TOKENS:
        return tokens, 0, 0
    first = next((index for index, token in enumerate(tokens) if token.supervised), 0)
    begin = 0 if first < _FEW_TOKENS // 2 else first - _BESIDE
    return tokens[begin : begin + _FEW_TOKENS], begin, max(0, len(tokens) - begin - _FEW_TOKENS)


def _tokens(tokens: tuple[Token, ...], *, colour: bool) -> Text:
    """Neighbouring supervised tokens alternate between two shades, so that their borders can be seen."""
    text = Text()
    for supervised, run in groupby(tokens, key=lambda token: token.supervised):
        if supervised and not colour:
            text.append("⟦")
        for index, token in enumerate(run):
            shade = ("black on green", "black on bright_green")[index % 2] if supervised else ""
            style = f"bold magenta on {shade.partition(' on ')[2] or 'default'}" if token.special else shade
            text.append(_visible(token.text), style)
        if supervised and not colour:
            text.append("⟧")
    return text


def _visible(text: str) -> str:
    """Line ends and tabs as signs; other control characters, which a terminal might obey, escaped."""
    shown = text.replace("\n", "↵\n").replace("\t", "→")
    return "".join(each if each.isprintable() or each == "\n" else f"\\x{ord(each):02x}" for each in shown)
