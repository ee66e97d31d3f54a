"""Three ways to show a run that is watched: one updating line, plain lines, JSON lines."""

import time
from typing import TYPE_CHECKING, Any, Protocol, Self

from slipstream.cli.display import STATE_STYLES, clock_time, percent, print_json_line, print_line, printable
from slipstream.cli.runs import figures
from slipstream.control_client import FeedMessage

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_BAR_CELLS = 24


class Screen(Protocol):
    """What a watched run is shown on; used as a context."""

    def take(self, message: FeedMessage) -> None:
        """Something happened; the run that it leads to is shown next."""

    def say(self, words: str) -> None:
        """Something that no message says in words."""

    def show(self, run: figures.Json) -> None:
        """The run as it is now."""

    def end(self, run: figures.Json) -> None:
        """It rests."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...


class _Lines:
    """What needs no preparation and no end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        pass


class JsonLines(_Lines):
    """The run, every message, and the run at its end: one object a line."""

    def __init__(self) -> None:
        self._has_begun = False

    def take(self, message: FeedMessage) -> None:
        """Print it."""
        print_json_line({"kind": message.kind, "cursor": message.cursor, "data": message.data})

    def say(self, _words: str) -> None:
        """Nothing: the messages say it to a program."""

    def show(self, run: figures.Json) -> None:
        """Print the first one."""
        if not self._has_begun:
            self._has_begun = True
            self.end(run)

    def end(self, run: figures.Json) -> None:
        """Print it."""
        print_json_line({"kind": "run", "cursor": run["event_cursor"], "data": run})


class PlainLines(_Lines):
    """Events as they happen, progress now and then."""

    def __init__(self, every_seconds: float) -> None:
        self._every_seconds = every_seconds
        self._telling = figures.Telling()
        self._printed_at: float | None = None
        self._is_event = False

    def take(self, message: FeedMessage) -> None:
        """Print an event."""
        self._is_event = message.kind == "event"
        if self._is_event:
            print_line(_event_line(message.data, self._telling))

    def say(self, words: str) -> None:
        """Print a line."""
        print_line(words)

    def show(self, run: figures.Json) -> None:
        """Print the first one, then progress when it is time."""
        if self._printed_at is None:
            print_line(f"{run['name']} {self._telling.state(run)}")
        elif self._is_event or time.monotonic() < self._printed_at + self._every_seconds:
            return
        self._printed_at = time.monotonic()
        print_line(figures.progress_words(run))

    def end(self, run: figures.Json) -> None:
        """Print how it ended."""
        print_line(_last_words(run, self._telling))


class LiveLine:
    """Events scroll by above a line that is written anew."""

    def __init__(self, console: "Console") -> None:
        from rich.live import Live

        self._live = Live(console=console, refresh_per_second=8, transient=True)
        self._telling = figures.Telling()

    def take(self, message: FeedMessage) -> None:
        """Print an event."""
        if message.kind == "event":
            self._live.console.print(printable(_event_line(message.data, self._telling)), soft_wrap=True)

    def say(self, words: str) -> None:
        """Print a line above."""
        self._live.console.print(words)

    def show(self, run: figures.Json) -> None:
        """Write the line anew."""
        self._live.update(_progress_line(run))

    def end(self, run: figures.Json) -> None:
        """Print how it ended."""
        words = printable(_last_words(run, self._telling))
        self._live.console.print(words, style=STATE_STYLES.get(run["state"], ""), soft_wrap=True)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, *_exception: Any) -> None:
        self._live.__exit__(None, None, None)


def _event_line(event: figures.Json, telling: figures.Telling) -> str:
    return f"{clock_time(event['time'])}  {telling.event(event)}"


def _last_words(run: figures.Json, telling: figures.Telling) -> str:
    return f"{run['name']} {telling.state(run)}\n{figures.progress_words(run)}"


def _progress_line(run: figures.Json) -> "RenderableType":
    from rich.columns import Columns
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    state, fraction = run["state"], run["progress"]["fraction"]
    head = Text(f"{run['name']} ", "bold")
    head.append(state, STATE_STYLES.get(state, ""))
    if run["trainers"]:
        head.append(f" on {', '.join(run['trainers'])}", "dim")
    parts: list[RenderableType] = [head]
    if fraction is not None:
        parts += [ProgressBar(total=1.0, completed=fraction, width=_BAR_CELLS), Text(percent(fraction))]
    conditions = [Text(printable(f"{one['type']}: {one['message']}"), "yellow") for one in run["conditions"]]
    return Group(Columns(parts, padding=(0, 1)), Text(figures.progress_words(run)), *conditions)
