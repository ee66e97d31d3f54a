"""What became of the records of a run's data, as its trainer reports it and people read it."""

from typing import Annotated

from pydantic import Field

from control_api.field_types import Body, Count, ShortText, Text


class DroppedRecords(Body):
    """Records that gave nothing to learn from, for one reason."""

    finding: ShortText
    """The reason, for programs; a value of slipstream.wire.data_report.Finding."""
    words: Text
    """The reason, for people."""
    count: Count
    examples: Annotated[list[Text], Field(max_length=16)]
    """The first ones: `file.jsonl:17`."""


class DataAccount(Body):
    """`read` = `used` + `other_split` + what was dropped."""

    read: Count
    """Records: lines that are not blank, array elements, rows."""
    used: Count
    other_split: Count
    """Records that are held out of training, or the other way round."""
    num_dropped: Count
    dropped: Annotated[list[DroppedRecords], Field(max_length=64)]
    """By reason, the most frequent first."""
