from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes.ledger_desk import LedgerDesk

DeskMaker = Callable[..., LedgerDesk]


@pytest.fixture
def make_desk(tmp_path: Path) -> Iterator[DeskMaker]:
    desks: list[LedgerDesk] = []

    def make(**sizes: int | None) -> LedgerDesk:
        desk = LedgerDesk(tmp_path / f"ledger-{len(desks)}.sqlite", **sizes)  # type: ignore[arg-type]
        desks.append(desk)
        return desk

    yield make
    for desk in desks:
        desk.close()


@pytest.fixture
def desk(make_desk: DeskMaker) -> LedgerDesk:
    return make_desk()
