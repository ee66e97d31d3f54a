"""Where the time of a server's engine goes while a subscriber counts its packs: on the host, and on the GPU."""

import statistics
from collections import deque
from pathlib import Path
from typing import Any

from benchmarks.times_since import TimesSince

_KEPT_PACKS = 400


class EngineTimes:
    """Milliseconds per pack of the engine's phases while the subscriber counts its packs."""

    def __init__(self, server: Any, counting: Path) -> None:
        """`counting`: the file that is there meanwhile."""
        self._server, self._counting = server, counting
        self._since: TimesSince | None = None
        self.milliseconds: dict[str, float] = {}

    def look(self) -> None:
        """To be called again and again."""
        if not self._counting.exists():
            return
        if self._since is None:
            self._since = TimesSince(self._server._served.producer.times)
        self.milliseconds = self._since.milliseconds()


class DeviceTimes:
    """What the GPU does between one pack and the next. For the engine's thread, until `milliseconds` is asked for."""

    def __init__(self) -> None:
        self._began: Any = None
        self._packs: deque[tuple[Any, Any, Any]] = deque(maxlen=_KEPT_PACKS)
        """The newest; of each where its forward began, where it ended, and where its copy to the ring ended."""

    def watch(self) -> None:
        """Mark every pack from now on, of every target of this process."""
        import torch

        from target_server.slot_writer import SlotWriter
        from target_server.target_model import TargetModel

        capture, begin = TargetModel.capture, SlotWriter.begin

        def marked_capture(*args: Any) -> Any:
            self._began = _mark(torch.cuda.current_stream())
            return capture(*args)

        def marked_begin(writer: SlotWriter, *args: Any) -> Any:
            computed = _mark(torch.cuda.current_stream())
            write = begin(writer, *args)
            assert writer._copies is not None, "there is nothing to mark without a GPU"
            self._packs.append((self._began, computed, _mark(writer._copies)))
            return write

        TargetModel.capture = marked_capture  # type: ignore[method-assign, assignment]
        SlotWriter.begin = marked_begin  # type: ignore[method-assign, assignment]

    def milliseconds(self) -> dict[str, float]:
        """Medians per pack: `compute`, `idle` from there to the next pack's beginning, `copy` to the ring."""
        packs = list(self._packs)
        if len(packs) < 2:
            return {}
        packs[-1][2].synchronize()
        spent = {
            "compute": [began.elapsed_time(computed) for began, computed, _ in packs],
            "idle": [packs[i][1].elapsed_time(packs[i + 1][0]) for i in range(len(packs) - 1)],
            "copy": [computed.elapsed_time(copied) for _, computed, copied in packs],
        }
        return {what: round(statistics.median(times), 2) for what, times in spent.items()}


def _mark(stream: Any) -> Any:
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event
