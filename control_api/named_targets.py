"""Targets that the deployment names: registered, or given their new address, when the server starts."""

import os
from collections.abc import Mapping, Sequence

from control_api.store import targets
from control_api.store.database import Database
from slipstream.errors import SlipstreamError
from slipstream.run_spec.names import is_name
from slipstream.run_spec.reasons import Reason
from slipstream.wire.channel import TargetClient


def parse_targets(flags: Sequence[str]) -> dict[str, str]:
    """Name → address of `NAME=ADDRESS` flags; without any, of the variable SLIPSTREAM_TARGETS (separated by commas).

    Raises:
        SlipstreamError: SPEC_INVALID, a name or an address is none, or a name has two addresses.
    """
    source = "--target"
    if not flags:
        source = "SLIPSTREAM_TARGETS"
        flags = [item.strip() for item in os.environ.get(source, "").split(",") if item.strip()]
    named: dict[str, str] = {}
    for item in flags:
        name, separator, address = item.partition("=")
        if not separator or not is_name(name):
            raise SlipstreamError(
                f"{source} has {item!r}, expected NAME=ADDRESS with a name of lower case letters, digits, . - and _",
                reason=Reason.SPEC_INVALID,
                remedy="Example: local=127.0.0.1:50051",
            )
        if named.setdefault(name, address) != address:
            raise SlipstreamError(
                f"{source} has two addresses for {name!r}: {named[name]} and {address}",
                reason=Reason.SPEC_INVALID,
                remedy="Give every target server a name of its own.",
            )
        TargetClient(address).close()  # refuses what is no address; nothing is sent
    return named


def register_targets(database: Database, named: Mapping[str, str], *, now: float) -> None:
    """Make the database say what the deployment says; what is registered so already is left as it is."""
    if not named:
        return
    with database.write() as session:
        for name, address in named.items():
            row = targets.find(session, name)
            if row is None:
                targets.add(session, name=name, address=address, now=now)
            elif row.address != address:
                # What is known of the model stays: it is asked again at once.
                row.address, row.status, row.detail = address, "UNKNOWN", "not asked yet"
