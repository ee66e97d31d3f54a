"""What runs need of a trainer, found out once a run: its settings, and the sizes that decide its memory."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from control_api.run_definition import run_sizes, served_sizes
from control_api.store.tables import Run
from slipstream.errors import SlipstreamError
from slipstream.plan.sizes import RunSizes, TargetSizes
from slipstream.run_spec.problems import describe_problem
from slipstream.run_spec.spec import RunSpec


@dataclass(frozen=True)
class Need:
    """Of one run."""

    spec: RunSpec | None
    """None: `problem` says why this version does not understand the definition."""
    problem: str = ""
    sizes: RunSizes | None = None
    """None: those of its target are not known here, and its trainer finds out whether it can hold the run."""
    is_final: bool = False
    """Nothing more is to be found out."""


_Key = tuple[str | int, TargetSizes | None]


class Needs:
    """Of all runs. A definition never changes, so that files are read once a run, and once more where its target says
    other sizes of its model. Threads may share it: what one forgets under another is read again."""

    def __init__(self, data_roots: tuple[Path, ...]) -> None:
        self._data_roots = data_roots
        self._known: dict[_Key, Need] = {}

    def find_out(self, runs: Iterable[Run]) -> None:
        """Read files, so that `of` need not within a transaction; where some were missing, they may have come.

        Forgets all other runs.
        """
        known = {_key(run): (run, self._known.get(_key(run))) for run in runs}
        self._known = {
            key: need if need is not None and need.is_final else self._read(run) for key, (run, need) in known.items()
        }

    def of(self, run: Run) -> Need:
        """The need of the run, as it was found out last."""
        need = self._known.get(_key(run))
        if need is None:
            need = self._known[_key(run)] = self._read(run)
        return need

    def remember(self, run: Run, spec: RunSpec, served: TargetSizes | None, sizes: RunSizes | None) -> None:
        """What was found out at its creation, from what its target said then."""
        self._known[_key(run)[0], served] = Need(spec, sizes=sizes, is_final=sizes is not None)

    def _read(self, run: Run) -> Need:
        try:
            spec = RunSpec.model_validate(run.spec)
        except ValidationError as error:  # another version wrote it, or a package has gone that brought its drafter
            return Need(None, "; ".join(describe_problem(problem, {}) for problem in error.errors()), is_final=True)
        # Held-out answers that are just being made anew are counted once they can be read.
        for with_answers in (True, False):
            with suppress(SlipstreamError):
                sizes = run_sizes(spec, served_sizes(run.target), self._data_roots, with_answers=with_answers)
                return Need(spec, sizes=sizes, is_final=with_answers and sizes is not None)
        # Its target is another one than when it was created: its trainer refuses it, in words.
        return Need(spec, is_final=True)


def _key(run: Run) -> _Key:
    """Not the id: that of a run whose creation was undone comes again."""
    return run.uid or run.id, served_sizes(run.target)
