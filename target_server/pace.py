"""⑥ Who waits for whom: a run waits for the slower ones of its convoy, as long as that is not most of its time.

Runs at one pace drift apart by a few packs and come together again; waiting for each other, they share every pack. A
run that is stuck, or much slower, is left behind instead: it travels apart, on its guaranteed slots, and what it needs
later is computed again. Seconds in which a run is held up count up, all others count down; at `patience` it goes on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from target_server.subscription import Subscription


@dataclass(slots=True)
class Pace:
    """How one run gets on with the others of its stream."""

    left_behind: int = 0
    """How often it was left behind; only runs with the same number travel together."""
    held_up: float = 0.0
    """Seconds, less those in which it was not."""
    is_held: bool = False
    """It wants a pack, and there is no slot for it."""
    _noted_at: float = 0.0

    def note(self, is_held: bool, now: float, patience: float) -> None:
        """What has been since the last call ends now."""
        elapsed = now - self._noted_at
        if self.is_held:
            self.held_up += elapsed
        elif self.held_up >= patience:
            self.held_up = 0.0  # it was let go on
        else:
            self.held_up = max(0.0, self.held_up - elapsed)
        self.is_held, self._noted_at = is_held, now


def leave_behind(convoy: "Sequence[Subscription]", held: "Sequence[Subscription]", patience: float) -> bool:
    """Leave the slowest of a convoy behind when one that it holds up has lost its patience; false when nobody is.

    Args:
        convoy: in the order of their cursors.
        held: members that want a pack for which there is no slot.
        patience: seconds.
    """
    slowest = convoy[0].low
    if not any(member.pace.held_up >= patience and member.low > slowest for member in held):
        return False
    for member in convoy:
        if member.low == slowest:
            member.pace.left_behind += 1
    return True


def rejoin(active: "Sequence[Subscription]", window: int) -> None:
    """A run that was left behind and has caught up, or is so far away that it travels apart anyway, is one of many."""
    for member in active:
        if not member.pace.left_behind:
            continue
        ahead = any(other.low > member.low for other in active)
        near = any(abs(other.low - member.low) <= 2 * window for other in active if other is not member)
        if not (ahead and near):
            member.pace.left_behind = 0
