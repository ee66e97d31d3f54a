"""How prompts are decoded: how many at once, how warm, over which caches."""

from dataclasses import dataclass
from pathlib import Path

from slipstream.run_spec.spec import TargetSpec

PLAIN = "plain"
TRAINED = "trained"
UNTRAINED = "untrained"
COMPILER = "inductor"
"""Backend of torch.compile."""


@dataclass(frozen=True)
class Setting:
    """One of those that an evaluation measures."""

    batch_size: int = 1
    temperature: float = 0.0

    @property
    def greedy(self) -> bool:
        """Outputs are determined, so that they can be compared token for token."""
        return self.temperature == 0.0

    def in_words(self) -> str:
        """For tables."""
        return f"batch {self.batch_size}, {'greedy' if self.greedy else f'temperature {self.temperature:g}'}"


@dataclass(frozen=True)
class DecodingPlan:
    """What a process needs to decode: it loads target and drafters itself."""

    checkpoint: Path
    target: TargetSpec
    device: str
    threads: int
    """CPU threads of each process."""
    max_new_tokens: int
    untrained_seed: int | None
    """Decode also with the drafter's first weights, made from this seed."""
    settings: tuple[Setting, ...] = (Setting(),)
    fixed_caches: bool = False
    """Decode with `BatchDecoder`; else one prompt at a time, greedily, over caches that grow."""
    graphs: bool = False
    """Rounds are CUDA graphs. Needs fixed caches."""
    compiled: bool = False
    """The target's layers and the drafter are compiled. Needs fixed caches."""
    sampling_seed: int = 0
    with_texts: bool = False
    """Say what each token of a drafter's answer adds to the text."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Drafters by name, in the order of the table."""
        return (TRAINED,) if self.untrained_seed is None else (UNTRAINED, TRAINED)

    def loop_in_words(self) -> str:
        """Which loop decodes, for the report."""
        if not self.fixed_caches:
            return "caches that grow"
        rounds = "rounds as CUDA graphs" if self.graphs else "no graphs"
        return f"caches of fixed size, {rounds}{', compiled' if self.compiled else ''}"
