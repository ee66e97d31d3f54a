"""What benchmarks/ablations.py changes in the base recipe, one thing at a time, the most telling first."""

from dataclasses import dataclass

BASE = "base"


@dataclass(frozen=True)
class Variant:
    """One row of the table."""

    name: str
    ingredient: str
    """What is varied."""
    settings: tuple[str, ...] = ()
    """KEY=VALUE that differ from the base."""
    steps_of: str | None = None
    """A variant whose step costs the same: as many steps are trained as that one's time gave. None: by the clock."""
    data_share: float = 1.0
    """Of the conversations."""


ADAMW = ("optimizer.kind=adamw",)
VARIANTS = (
    Variant(BASE, "base"),
    Variant("adamw", "optimizer", ADAMW),
    Variant("cross-entropy", "objective", ("loss.objective=cross_entropy",)),
    Variant("anchors 512", "anchors", ("train.anchors_per_pack=512",)),
    Variant("layers 3", "layers", ("drafter.num_layers=3",)),
    # Every conversation is a row of its own, padded to one length, as many rows as fill a pack.
    Variant(
        "no packing",
        "packing",
        (
            *("data.pack_tokens=1024", "data.window_documents=1"),
            *("train.packs_per_step=8", "train.anchors_per_pack=128"),
        ),
    ),
    Variant("block 16", "block size", ("drafter.block_size=16",)),
    Variant("2 packs a step", "packs a step", ("train.packs_per_step=2",)),
    Variant("anchors 256", "anchors", ("train.anchors_per_pack=256",)),
    Variant("layers 2", "layers", ("drafter.num_layers=2",)),
    Variant("lk hybrid", "objective", ("loss.objective=lk_hybrid",)),
    Variant("layers 1", "layers", ("drafter.num_layers=1",)),
    Variant("anchors 128", "anchors", ("train.anchors_per_pack=128",)),
    Variant("4 packs a step", "packs a step", ("train.packs_per_step=4",)),
    Variant("one feature, layer 14", "features", ("drafter.target_layer_ids=[14]",)),
    Variant("base, another seed", "noise", ("train.seed=1",), steps_of=BASE),
    Variant("base, third seed", "noise", ("train.seed=2",), steps_of=BASE),
    # A step costs less in FP8; here it is to learn as much in as many steps.
    Variant("fp8", "precision", ("train.fp8=true",), steps_of=BASE),
    Variant("fp8, another seed", "precision", ("train.fp8=true", "train.seed=1"), steps_of=BASE),
    Variant("fp8, third seed", "precision", ("train.fp8=true", "train.seed=2"), steps_of=BASE),
    Variant("muon lr 3e-3", "learning rate", ("optimizer.muon_learning_rate=3e-3",), steps_of=BASE),
    Variant("muon lr 3e-2", "learning rate", ("optimizer.muon_learning_rate=3e-2",), steps_of=BASE),
    Variant("decay weights", "slot weights", ("loss.slot_weights=decay",), steps_of=BASE),
    Variant("uniform weights", "slot weights", ("loss.slot_weights=uniform",), steps_of=BASE),
    Variant("a quarter of the data", "data", steps_of=BASE, data_share=1 / 4),
    Variant("ema 0.99", "ema", ("optimizer.ema_decay=0.99",), steps_of=BASE),
    Variant("ema 0.999", "ema", ("optimizer.ema_decay=0.999",), steps_of=BASE),
    Variant("a sixteenth of the data", "data", steps_of=BASE, data_share=1 / 16),
    Variant("adamw lr 2e-3", "learning rate", (*ADAMW, "optimizer.learning_rate=2e-3"), steps_of="adamw"),
    Variant("adamw lr 6e-4", "learning rate", (*ADAMW, "optimizer.learning_rate=6e-4"), steps_of="adamw"),
)
BY_NAME = {variant.name: variant for variant in VARIANTS}
BASE_SEEDS = (BASE, "base, another seed", "base, third seed")
FP8_SEEDS = ("fp8", "fp8, another seed", "fp8, third seed")
