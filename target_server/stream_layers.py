"""④ Which hidden states a run reads, and which a stream must hold so that each of its runs can: the union."""

from dataclasses import dataclass

from target_server.subscription import SubscriptionTerms


@dataclass(frozen=True, slots=True)
class Layers:
    """Captured outputs of the target."""

    ids: tuple[int, ...]
    """Zero-based, ascending."""
    last_hidden_state: bool

    @classmethod
    def of(cls, terms: SubscriptionTerms) -> "Layers":
        """What a run asks for."""
        return cls(terms.layer_ids, terms.last_hidden_state)

    def cover(self, other: "Layers") -> bool:
        """Whether everything of the other is in here."""
        return set(other.ids) <= set(self.ids) and self.last_hidden_state >= other.last_hidden_state

    def joined(self, other: "Layers") -> "Layers":
        """Those of both."""
        ids = tuple(sorted({*self.ids, *other.ids}))
        return Layers(ids, self.last_hidden_state or other.last_hidden_state)
