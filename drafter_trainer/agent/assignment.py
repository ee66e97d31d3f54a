"""What the control API's answer says: which run to train, how, and from which line on it wants to hear."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.states import DesiredState


@dataclass(frozen=True)
class Assignment:
    """A run that this trainer is to work on."""

    id: int
    run: str
    run_uid: str | None
    """No other run's, whatever database the control API has; None: that of an older control API."""
    attempt: int
    desired_state: DesiredState
    directory: str
    """Name of the run's directory in the directory of runs."""
    spec: Mapping[str, Any]
    """The run definition, complete, as JSON."""
    target: str
    """HOST:PORT"""
    next_metric_index: int
    """The line of metrics.jsonl to send next."""
    next_log_line: int
    """The line of the attempt's log to send next."""

    @property
    def key(self) -> tuple[int, str | None]:
        """What makes it the same one: a control API with a new database counts from 1 again."""
        return self.id, self.run_uid

    @classmethod
    def from_answer(cls, fields: Mapping[str, Any]) -> Self:
        """Read `assignment` of an answer; keys that are not known here are of a newer control API.

        Raises:
            SlipstreamError: PROTOCOL_MISMATCH, something is missing.
        """
        try:
            return cls(
                id=fields["id"],
                run=fields["run"],
                run_uid=fields.get("run_uid"),
                attempt=fields["attempt"],
                desired_state=DesiredState(fields["desired_state"]),
                directory=_directory_name(fields["directory"]),
                spec=fields["spec"],
                target=fields["target"]["address"],
                next_metric_index=fields["next_metric_index"],
                next_log_line=fields["next_log_line"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise SlipstreamError(
                f"The control API's answer cannot be understood: {type(error).__name__} {error}.",
                reason=Reason.PROTOCOL_MISMATCH,
                remedy="Install the same version of Slipstream on both sides.",
            ) from error


def _directory_name(name: str) -> str:
    """A name that leads nowhere but into the directory of runs."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"{name!r} is no name of a directory")
    return name
