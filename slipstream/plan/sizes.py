"""The sizes that decide what a run costs: of the target, of the drafter, of a pack, of a step. Numbers only."""

from dataclasses import dataclass, replace
from typing import Literal

from slipstream.errors import SlipstreamError
from slipstream.run_spec.architectures import DFLASH
from slipstream.run_spec.head_sizes import require_heads
from slipstream.run_spec.objective import CROSS_ENTROPY, ObjectiveName
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import RunSpec
from slipstream.run_spec.target_layers import target_layers

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_NORMS_OF_A_LAYER = 2
TILE = 128
"""Edge of an attention tile: queries and keys are padded to it."""
MOST_RECORDED_PARAMETERS = 100_000_000
"""Of a drafter whose step train.cuda_graphs = "auto" records. Beyond, computing takes longer than launching, and the
graph would only keep a second pool of memory."""
MUON_NUMBERS_AT_ONCE = 1 << 26
"""In matrices that Muon orthogonalises together: enough to fill a GPU, little beside the rest of a large drafter."""


@dataclass(frozen=True)
class TargetSizes:
    """What a drafter takes over from its target."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool


@dataclass(frozen=True)
class RunSizes:
    """One run on one device."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    num_layers: int
    num_features: int
    block_size: int
    pack_tokens: int
    """Tokens in a pack (T)."""
    anchors_per_pack: int
    """Anchors in a pack (A)."""
    packs_per_step: int
    prefetch_packs: int
    compute_bytes: int
    """Of a number in the drafter's precision."""
    wire_bytes: int
    """Of a number of the target's hidden states."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    moving_average: bool = False
    needs_target_distribution: bool = False
    objectives: tuple[ObjectiveName, ...] = (CROSS_ENTROPY,)
    fp8: bool = False
    cuda_graphs: bool = False
    checkpointed_layers: int = 0
    """Of the first so many, what is inside them is computed again in the backward."""
    chunk_rows: int | None = None
    """Rows of logits at once; None: by the device's memory."""
    least_pack_tokens: int = TILE
    """A pack that is to hold the longest document cannot be shorter."""
    layers_are_named: bool = False
    """The recipe says of every layer what it is: it cannot have fewer without other changes."""
    on_cpu: bool = False
    """Nothing is compiled there, and memory is the host's."""
    measures: bool = False
    """Held-out acceptance is measured between steps."""
    attention_masks: int = 1
    """Kinds of layers, full and sliding: on a CPU each has a mask."""
    feature_noise: bool = False
    """A step has a copy of its pack's features, with noise."""
    heldout_tokens: int = 0
    """Of the packs of its answers, which stay in the host's memory; 0 where their file is not here."""

    @property
    def block_rows(self) -> int:
        """R = A·B."""
        return self.anchors_per_pack * self.block_size

    @property
    def keys(self) -> int:
        """Context and block keys of a layer, padded."""
        return _padded(self.pack_tokens + self.block_rows)

    @property
    def queries(self) -> int:
        """Block queries, padded."""
        return _padded(self.block_rows)

    @property
    def query_width(self) -> int:
        """Of all heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Of all key heads together."""
        return self.num_key_value_heads * self.head_dim

    @property
    def linear_parameters(self) -> int:
        """Of a draft layer's matrices."""
        attention = 2 * self.hidden_size * (self.query_width + self.key_width)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def matrix_parameters(self) -> int:
        """Of all matrices: `fc` and the layers'."""
        return self.num_features * self.hidden_size**2 + self.num_layers * self.linear_parameters

    @property
    def vector_parameters(self) -> int:
        """Of all norms."""
        of_layer = _NORMS_OF_A_LAYER * self.hidden_size + 2 * self.head_dim
        return 2 * self.hidden_size + self.num_layers * of_layer

    @property
    def parameters(self) -> int:
        """What is trained."""
        return self.matrix_parameters + self.vector_parameters

    @property
    def optimizer_numbers(self) -> int:
        """Of the optimizer's state: AdamW keeps two moments; Muon one of a matrix, and leaves vectors to AdamW."""
        return (1 if self.optimizer == "muon" else 2) * self.matrix_parameters + 2 * self.vector_parameters

    @property
    def sums_gradients(self) -> bool:
        """Whether a step has a float32 buffer for gradients; else the optimizer reads them as they were computed."""
        return self.on_cpu or self.optimizer != "adamw" or self.packs_per_step > 1 or self.cuda_graphs

    @property
    def pack_bytes(self) -> int:
        """Of a pack as a step reads it: ids, mask, positions, hidden states."""
        return self._pack_bytes(self.num_features + self.needs_target_distribution)

    @property
    def measured_pack_bytes(self) -> int:
        """Of a pack of held-out answers: the target's distribution is not asked for."""
        return self._pack_bytes(self.num_features)

    def _pack_bytes(self, states: int) -> int:
        rows = 3 * 4 + 1
        return self.pack_tokens * (states * self.hidden_size * self.wire_bytes + rows)

    @classmethod
    def of(cls, spec: RunSpec, target: TargetSizes) -> "RunSizes":
        """Fill in what the recipe leaves to the target.

        Raises:
            SlipstreamError: SPEC_INVALID, heads that do not divide or cannot be rotated; TARGET_INCOMPATIBLE, layers
                that the target does not have; ENVIRONMENT_UNSUPPORTED, another architecture.
        """
        drafter, train = spec.drafter, spec.train
        if drafter.architecture != DFLASH:
            raise SlipstreamError(
                f"drafter.architecture is {drafter.architecture!r}; the plan knows the sizes of {DFLASH!r} alone",
                reason=Reason.ENVIRONMENT_UNSUPPORTED,
                remedy="Start the run with train.max_steps = 1: its log says how much memory was used.",
            )
        heads = drafter.num_attention_heads or target.num_attention_heads
        kv_heads = drafter.num_key_value_heads or target.num_key_value_heads
        head_dim = drafter.head_dim or target.head_dim
        require_heads(heads, kv_heads, head_dim)
        sizes = cls(
            hidden_size=target.hidden_size,
            intermediate_size=drafter.intermediate_size or target.intermediate_size,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=target.vocab_size,
            tie_word_embeddings=target.tie_word_embeddings,
            num_layers=drafter.num_layers,
            num_features=len(target_layers(drafter, target.num_layers)),
            block_size=drafter.block_size,
            pack_tokens=spec.data.pack_tokens,
            anchors_per_pack=train.anchors_per_pack,
            packs_per_step=train.packs_per_step,
            prefetch_packs=spec.stream.prefetch_packs,
            compute_bytes=_BYTES[train.precision],
            wire_bytes=_BYTES[spec.target.dtype],
            optimizer=spec.optimizer.kind,
            moving_average=spec.optimizer.ema_decay is not None,
            needs_target_distribution=spec.loss.needs_target_distribution,
            objectives=tuple(spec.loss.objective),
            fp8=train.fp8,
            checkpointed_layers=spec.recomputed_layers,
            chunk_rows=spec.loss.chunk_rows,
            least_pack_tokens=spec.data.max_document_tokens or TILE,
            layers_are_named=drafter.layer_types is not None,
            on_cpu=train.attention == "sdpa",
            measures=spec.eval.heldout is not None,
            attention_masks=len(set(drafter.layer_types or ("full_attention",))),
            feature_noise=train.feature_noise > 0.0,
        )
        return replace(sizes, cuda_graphs=_records(spec, sizes.parameters))


def _records(spec: RunSpec, parameters: int) -> bool:
    """As the trainer decides it."""
    if spec.train.attention == "sdpa":
        return False
    if spec.train.cuda_graphs == "auto":
        return parameters <= MOST_RECORDED_PARAMETERS
    return spec.train.cuda_graphs


def _padded(length: int) -> int:
    return -(-length // TILE) * TILE
