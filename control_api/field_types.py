"""Types of the fields that travel over REST, and the bases of bodies and resources."""

from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, PlainSerializer

from control_api.storable import storable
from slipstream.run_spec.names import NAME_PATTERN, NAME_RULE

LARGEST = 2**53 - 1  # what every JSON reader holds exactly, and SQLite stores

Text = Annotated[str, Field(max_length=4000, pattern=r"^[^\x00]*$")]
ShortText = Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[^\x00-\x1f]+$")]
Name = Annotated[str, Field(pattern=NAME_PATTERN, description=NAME_RULE)]
Count = Annotated[int, Field(strict=True, ge=0, le=LARGEST)]
JsonObject = Annotated[dict[str, Any], AfterValidator(storable)]
Moment = Annotated[
    datetime,
    PlainSerializer(
        lambda moment: moment.astimezone(UTC).isoformat(timespec="milliseconds"), return_type=str, when_used="json"
    ),
]


def _recent(moment: datetime) -> datetime:
    if not 2000 <= moment.year <= 2200:
        raise ValueError("expected a time between the years 2000 and 2200")
    return moment


ReportedTime = Annotated[AwareDatetime, AfterValidator(_recent)]


class Body(BaseModel):
    """Base of what clients send: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class Resource(BaseModel):
    """Base of what clients read."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)
