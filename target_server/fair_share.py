"""⑥ Whose pack is computed next: subscriptions share the target's time by deficit round-robin.

Every subscription that wants a pack gets the same credit a round; a pack is paid for, in equal parts, by those that
need it. So three runs that travel together and one far away have a quarter of the target each, and the three move
three times as fast for it. Who wants nothing keeps no credit: nobody saves up and then shuts the others out.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from target_server.scheduling import Choice
from target_server.subscription import Subscription


@dataclass(frozen=True, slots=True)
class Offer:
    """A pack that could be computed now."""

    stream: str
    choice: Choice
    cost: float
    """Of the target's time; in tokens."""
    payers: Sequence[Subscription]
    """Those that need the pack."""

    @property
    def credit(self) -> float:
        """What the payers have."""
        return sum(payer.credit for payer in self.payers)


class FairShare:
    """Deficit round-robin over subscriptions. Used under the ledger's lock."""

    def __init__(self) -> None:
        self._turn = 0

    def take(self, offers: Collection[Offer], everybody: Iterable[Subscription]) -> Offer | None:
        """Choose an offer and let its payers pay; of those that can be paid, the one served least recently.

        Args:
            offers: at most one for every convoy.
            everybody: all subscriptions, also those that want nothing now.
        """
        payers = {payer.record.name: payer for offer in offers for payer in offer.payers}
        for subscription in everybody:
            if subscription.record.name not in payers:
                subscription.credit = min(0.0, subscription.credit)
        if not offers:
            return None
        quantum = max(offer.cost for offer in offers)
        rounds = min(math.ceil((offer.cost - offer.credit) / (quantum * len(offer.payers))) for offer in offers)
        if rounds > 0:
            for payer in payers.values():
                payer.credit += rounds * quantum
        affordable = [offer for offer in offers if offer.credit >= offer.cost]
        chosen = min(affordable, key=lambda offer: max(payer.served for payer in offer.payers))
        self._turn += 1
        for payer in chosen.payers:
            payer.credit -= chosen.cost / len(chosen.payers)
            payer.served = self._turn
        return chosen
