"""Which part of the pipeline decides how fast a run is: the target, the wire between, or the trainer.

Two measurements are needed.

* `data_wait_ratio`, the trainer's: the share of its time in which no step could start for want of packs. Up to 0.05 the
  run would be at most a twentieth faster with an infinitely fast target, so the TRAINER decides. From 0.2 on a fifth of
  the trainer lies idle: something before it decides. Between the two neither side has much to win: BALANCED.
* `target_wait_ratio`, the target's: the share of its time in which the run waited there for a pack to be computed. The
  target computes the next packs while one is being read, so who still waits there waits for the slowest stage: TARGET.
  Below 0.1 (a poll that finds its pack ready takes a round trip, too) the packs are there before the trainer has read
  the ones before, and still it waits: the WIRE decides.
"""

from collections.abc import Set

from control_api.schemas import Bottleneck
from control_api.target_visit import StreamStats

TRAINER_DECIDES = 0.05
TRAINER_STARVES = 0.2
TARGET_DECIDES = 0.1
SHORTEST_LOOK_SECONDS = 5.0
"""Between the two looks that a share is taken from: more than two long polls of a trainer."""


def bottleneck(data_wait_ratio: float, target_wait_ratio: float | None) -> Bottleneck | None:
    """See the module; None while what decides is not known."""
    if data_wait_ratio <= TRAINER_DECIDES:
        return "TRAINER"
    if data_wait_ratio < TRAINER_STARVES:
        return "BALANCED"
    if target_wait_ratio is None:
        return None
    return "TARGET" if target_wait_ratio >= TARGET_DECIDES else "WIRE"


class WaitMeter:
    """Turns counters that only grow into the share of the time since an earlier look. For one thread."""

    def __init__(self) -> None:
        self._earlier: dict[str, StreamStats] = {}
        self._shares: dict[str, float] = {}

    def share(self, subscription: str, stats: StreamStats) -> float | None:
        """`target_wait_ratio` as of now; None until there were two looks far enough apart."""
        earlier = self._earlier.setdefault(subscription, stats)
        seconds = stats.serving_seconds - earlier.serving_seconds
        if seconds < 0:  # the server is another process: it counts anew
            self._shares.pop(subscription, None)
        if seconds < 0 or seconds >= SHORTEST_LOOK_SECONDS:
            self._earlier[subscription] = stats
        if seconds >= SHORTEST_LOOK_SECONDS:
            waited = stats.wait_seconds - earlier.wait_seconds
            self._shares[subscription] = min(1.0, max(0.0, waited / seconds))
        return self._shares.get(subscription)

    def keep(self, subscriptions: Set[str]) -> None:
        """Forget all others."""
        for name in self._earlier.keys() - subscriptions:
            del self._earlier[name]
            self._shares.pop(name, None)
