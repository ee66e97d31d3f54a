"""Phase times of a part of a run: what was added since a moment, per pack."""

from slipstream.telemetry.phase_times import PhaseTimes


class TimesSince:
    """The moment is that of the construction. Any thread may ask."""

    def __init__(self, times: PhaseTimes) -> None:
        self._times = times
        self._seconds, self._packs = dict(times.seconds), times.packs

    def milliseconds(self) -> dict[str, float]:
        """Per pack and phase; empty without a pack."""
        since = PhaseTimes()
        since.packs = self._times.packs - self._packs
        since.seconds = {
            phase: spent - self._seconds.get(phase, 0.0) for phase, spent in dict(self._times.seconds).items()
        }
        return since.milliseconds()
