"""Packs that may have crashed an engine. One that has certainly done so twice is never tried again.

When an engine crashes with two packs in flight, nobody can say which of them did it: both become suspects. A suspect is
computed alone from then on. If its engine crashes once more it was the pack; if not, it is cleared.
"""

import threading

PackKey = tuple[str, int]
"""Stream and sequence number."""


class Suspects:
    """Of all engines of a server. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._crashes: dict[PackKey, int] = {}

    def includes(self, pack: PackKey) -> bool:
        """Whether the pack must be computed alone."""
        with self._lock:
            return pack in self._crashes

    def clear(self, pack: PackKey) -> None:
        """It was computed."""
        with self._lock:
            self._crashes.pop(pack, None)

    def accuse(self, pack: PackKey, *, alone: bool) -> bool:
        """Its engine has crashed; `alone`: with nothing else in flight. True: the pack is to be set aside."""
        with self._lock:
            crashes = self._crashes.get(pack, 0) + 1
            if alone and crashes >= 2:
                self._crashes.pop(pack, None)
                return True
            self._crashes[pack] = crashes
            return False
