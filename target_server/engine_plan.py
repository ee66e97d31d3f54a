"""What a server's engine processes are started with. Nothing is started here."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.engine_devices import Groups

PROGRAM = (sys.executable, "-P", "-m", "target_server", "engine")


@dataclass(frozen=True)
class EnginePlan:
    """The engine processes of a server."""

    devices: Groups
    threads: int | None = None
    """CPU threads of a rank."""
    program: Sequence[str] = PROGRAM
    flags: tuple[str, ...] = ()
    """Of the program, about logs."""

    @property
    def ranks(self) -> int:
        """Of an engine."""
        return len(self.devices[0])

    def in_words(self) -> str:
        """`cuda:0+cuda:1,cuda:2+cuda:3`: two engines of two ranks."""
        return ",".join("+".join(engine) for engine in self.devices)
