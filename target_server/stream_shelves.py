"""⑥ The catalog's side of the ledger: a stream comes onto a shelf, gets another one, and leaves it.

A stream in use gets another shelf when its packs shall have more in them than there is room for in its slots. Nobody is
refused and nothing is lost: leases on the old shelf are void, so that ConfirmRead rejects what was read on the way, and
its packs are delivered, and computed, again.
"""

from collections.abc import Callable

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from target_server.lease_book import LeaseBook
from target_server.shelf import Shelf

PATIENCE_SECONDS = 60.0
"""For packs that are being computed; the first of a length may wait for a compiler."""


class StreamShelves:
    """The catalog's verbs. Thread-safe."""

    def __init__(self, book: LeaseBook) -> None:
        self._book = book

    def add(self, stream: str, shelf: Shelf, horizon: int | None = None) -> None:
        """Serve a stream from now on. No cursor may lie beyond pack `horizon`, also where the stream repeats."""
        with self._book.lock:
            self._book.shelves[stream] = shelf
            self._book.horizons[stream] = horizon
            self._book.unusable.setdefault(stream, {})

    def retire(self, stream: str) -> bool:
        """Stop serving a stream that no run uses now; False when one does. Its subscriptions stay."""
        book = self._book
        with book.lock:
            book.expire()
            members = list(book.members(stream))
            if book.shelves[stream].is_writing or any(book.present(each) or each.leased for each in members):
                return False
            del book.shelves[stream]
            return True

    def exchange(self, stream: str, make: Callable[[], Shelf]) -> None:
        """Give a stream another shelf.

        Args:
            stream: on a shelf.
            make: called once nobody writes into the old shelf or has a lease on it; not under the book's lock. When it
                raises, the stream has no shelf any more.

        Raises:
            SlipstreamError: TARGET_LOADING while a pack of the stream is still being computed; whatever `make` raises.
        """
        book = self._book
        with book.lock:
            old = book.shelves[stream]
            book.held_streams.add(stream)
            book.changed()
            if not book.packs.wait_for(lambda: not old.is_writing, PATIENCE_SECONDS):
                book.held_streams.discard(stream)
                book.changed()
                raise SlipstreamError(
                    f"{stream} is to be served with more layers, but a pack of it has been in work for "
                    f"{PATIENCE_SECONDS:.0f} s.",
                    reason=Reason.TARGET_LOADING,
                    remedy="Ask again.",
                )
            for member in book.members(stream):
                book.void(member)
        made: Shelf | None = None
        try:
            made = make()
            made.remember(old)
        finally:
            with book.lock:
                if made is None:
                    del book.shelves[stream]
                else:
                    book.shelves[stream] = made
                book.held_streams.discard(stream)
                book.changed()
