"""The inside of a target server, step by step: every part real, no thread, no RPC, and a clock that stands still.

Other than LiveTarget, which has both, it computes when it is told to: a test decides what comes before what.
"""

from pathlib import Path

from target_server.lease_book import LeaseBook, Limits
from target_server.lease_ledger import Ask, LeaseLedger, SeekTo
from target_server.ledger_store import LedgerStore
from target_server.producer import Producer
from target_server.stream_control import StreamControl
from target_server.stream_shelves import StreamShelves
from target_server.streams import StreamCatalog
from target_server.subscription import SubscriptionTerms
from target_server.target_model import TargetModel
from target_server.work_queue import WorkQueue


class SteppedTarget:
    """Streams, ledger and engine of one target."""

    def __init__(
        self, target: TargetModel, ledger: Path, *, shm_dir: Path | None = None, shelf_bytes: int = 2**20
    ) -> None:
        """`shm_dir`: None for payloads in memory of this process only."""
        self.now = 0.0
        self.target = target
        self.ledger_file = ledger
        self.store = LedgerStore(ledger)
        # What is computed is what was asked for.
        self.book = LeaseBook(self.store, Limits(ahead=0), clock=self.clock)
        self.ledger = LeaseLedger(self.book)
        self.control = StreamControl(self.book)
        self.queue = WorkQueue(self.book)
        self.catalog = StreamCatalog(
            target, StreamShelves(self.book), shelf_bytes=shelf_bytes, shm_dir=shm_dir, data_roots=None
        )
        self.producer = Producer(target, self.queue, self.catalog)

    def clock(self) -> float:
        """The ledger's."""
        return self.now

    def join(self, terms: SubscriptionTerms) -> tuple[str, str]:
        """Open and seek; returns the subscription and the stream."""
        stream = self.catalog.open(terms)
        record = self.ledger.open(terms, stream.name, self.target.fingerprint, stream.end(terms.max_epochs))
        self.ledger.seek(record.name, SeekTo(0, 0, record.incarnation))
        return record.name, stream.name

    def run(self, name: str, packs: int) -> None:
        """Ask for packs and let the engine compute them."""
        self.ledger.lease(name, Ask(1, packs))
        while (work := self.queue.next_work(0.0)) is not None:
            self.producer.compute(work)

    def close(self) -> None:
        """Give memory and file back."""
        self.catalog.close()
        self.store.close()
