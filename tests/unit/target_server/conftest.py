"""A ledger alone; and what a target server has inside, on a tiny target and thirty conversations."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slipstream.run_spec.spec import TargetSpec
from target_server.subscription import SubscriptionTerms
from target_server.target_model import TargetModel
from tests.fakes.ledger_desk import LedgerDesk
from tests.fakes.served_model import LAYERS, data_spec_json, write_conversations, write_tiny_target
from tests.fakes.stepped_target import SteppedTarget

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


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    """A tiny one, loaded; what a test patches in it is put back."""
    directory = write_tiny_target(tmp_path_factory.mktemp("model"))
    return TargetModel.load(TargetSpec(model=str(directory), dtype="float32"), device="cpu")


@pytest.fixture(scope="session")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_conversations(tmp_path_factory.mktemp("data") / "conversations.jsonl", count=30)


@pytest.fixture
def engine(target: TargetModel, tmp_path: Path) -> Iterator[SteppedTarget]:
    made = SteppedTarget(target, tmp_path / "ledger.sqlite")
    yield made
    made.close()


@pytest.fixture
def terms(conversations: Path) -> SubscriptionTerms:
    return SubscriptionTerms("a", data_spec_json(conversations), LAYERS, True, 1, max_epochs=1)
