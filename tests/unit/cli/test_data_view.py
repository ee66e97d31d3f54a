"""What `slipstream data inspect` shows: one thing is not called several, and a place is named once."""

from slipstream.cli.data_view import inspection_view
from slipstream.counted import counted
from slipstream.data_inspection import InspectedDocument, InspectedSource, Inspection, Lengths, Token
from slipstream.wire.data_report import Finding, ReportBuilder


def shown(identity: str) -> str:
    builder = ReportBuilder()
    builder.read = builder.used = builder.documents = builder.tokens = builder.mask_samples = 1
    for _ in range(2):
        builder.note(Finding.ANSWER_SKIPPED, "a.jsonl:1")
    report = builder.build("train")
    lengths = Lengths(shortest=1, mean=1.0, median=1, percentile_90=1, percentile_99=1, longest=1, histogram=((32, 1),))
    source = InspectedSource(
        name="a.jsonl", path="/a.jsonl", size_bytes=33, complete=True, report=report, lengths=lengths
    )
    token = Token(id=5, text="Hi", supervised=True, special=False)
    document = InspectedDocument(number=1, id=identity, where="a.jsonl:1", tokens=(token,))
    inspection = Inspection(
        model="m", limit=10, max_document_tokens=128, pack_tokens=128, packs=1, filled=0.01, sources=(source,),
        report=report, lengths=lengths, documents=(document,),
    )  # fmt: skip
    return "\n".join(part.plain for part in inspection_view(inspection, whole=False, colour=False))


def test_one_is_one() -> None:
    text = shown("a.jsonl:1")
    for words in (
        "a.jsonl  33 bytes, all of it",
        "1 conversation read: 1 used",
        "1 document, 1 token, ",
        "loss mask verified on 1 conversation\n",
        "1 pack of 128 tokens an epoch",
        "document 1  a.jsonl:1: 1 token, 1 supervised",
        "(first turn, or changed by the template) (a.jsonl:1, …)",
    ):
        assert words in text
    assert "document 1  talk-7 (a.jsonl:1): 1 token" in shown("talk-7")
    assert (counted(0, "pack"), counted(1, "pack"), counted(1200, "pack")) == ("0 packs", "1 pack", "1,200 packs")
