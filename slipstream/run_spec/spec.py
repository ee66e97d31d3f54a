"""RunSpec: everything that decides what a run learns. Frozen, typed, torch-free; unknown keys are refused.

Deployment settings (ports, devices, threads, directories) are not here: they come from flags or the environment and
never change what is learned.
"""

from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    StrictBool,
    model_validator,
)

from slipstream.run_spec.architectures import DFLASH, require_installed
from slipstream.run_spec.names import NAME_PATTERN
from slipstream.run_spec.objective import CROSS_ENTROPY, LK_HYBRID, Objective

Dtype = Literal["bfloat16", "float16", "float32"]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
TokenId = Annotated[int, Field(ge=0)]
LayerId = Annotated[int, Field(ge=0)]
Name = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$")]
LONGEST_BLOCK = 64
"""Tokens of a block, the last accepted one included."""
MAX_EPOCHS = 10_000
"""Of one run. A pack far ahead is found by planning every epoch before it."""


class Section(BaseModel):
    """Base of every table of a recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class TargetSpec(Section):
    """The frozen model whose decoding the drafter accelerates."""

    model: Name
    """A local directory, a hub name, or a .gguf file."""
    revision: Name | None = None
    """Hub revision to pin."""
    dtype: Dtype = "bfloat16"
    """Precision of the forward pass and of the hidden states on the wire."""
    trust_remote_code: bool = False
    """Run modelling code that ships with the model."""
    compile: Literal["auto"] | bool = "auto"
    """Compile the target's layers. auto: see the server's log, which says what was chosen and why."""


class DataSpec(Section):
    """Conversations and how they become packs. Its canonical JSON is part of the stream's identity."""

    files: Annotated[tuple[Name, ...], Field(min_length=1)]
    """JSONL, JSON (both also .gz), Parquet or Arrow files, globs, directories, or `hf://datasets/OWNER/NAME@REVISION`;
    relative paths are resolved against the recipe's directory. See docs/data.md."""
    format: Literal["auto", "openai", "sharegpt", "completion", "tokens"] = "auto"
    """Layout of a record: OpenAI `messages`, ShareGPT `conversations`, `prompt` and `completion`, or `input_ids` and
    `loss_mask`; auto decides record by record."""
    train_turns: Literal["all", "last"] = "all"
    """Which of a conversation's answers are trained; those with `"weight": 0` never are."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Orders the documents of every epoch."""
    pack_tokens: Annotated[int, Field(ge=128, le=1 << 24, multiple_of=128)] = 2048
    """Tokens in a pack (T)."""
    window_documents: PositiveInt = 512
    """Documents that are packed together; larger fills packs better, smaller mixes less."""
    max_document_tokens: PositiveInt | None = None
    """Documents are cut after so many tokens; default: pack_tokens."""
    heldout_fraction: Fraction = 0.0
    """Share of documents (by hash of the id) that never enters the stream."""

    @model_validator(mode="after")
    def _documents_fit(self) -> "DataSpec":
        if self.max_document_tokens is not None and self.max_document_tokens > self.pack_tokens:
            raise ValueError(
                f"max_document_tokens is {self.max_document_tokens}, but a document must fit into a pack of "
                f"pack_tokens = {self.pack_tokens}"
            )
        return self


class DrafterSpec(Section):
    """The drafter. Sizes left out are the target's. An architecture refuses what it does not read."""

    architecture: Annotated[Name, AfterValidator(require_installed)] = DFLASH
    """dflash, or one that a package brings: see docs/drafters.md."""
    options: dict[Name, bool | int | float | str] = {}
    """Settings of such an architecture, as its package describes them."""
    num_layers: PositiveInt = 5
    """Draft layers."""
    block_size: Annotated[int, Field(ge=2, le=LONGEST_BLOCK)] = 16
    """Tokens per block (B): the last accepted token and B-1 drafted ones."""
    num_features: PositiveInt | None = None
    """How many target layers feed the drafter; default: num_layers."""
    target_layer_ids: tuple[LayerId, ...] | None = None
    """Zero-based target layers, explicit; default: spread evenly as DFlash does."""
    mask_token_id: TokenId | None = None
    """Vocabulary row that stands for a token to be predicted."""
    mask_token: Name | None = None
    """The same, by the token's text."""
    num_attention_heads: PositiveInt | None = None
    """Query heads of a draft layer."""
    num_key_value_heads: PositiveInt | None = None
    """Key and value heads of a draft layer; divides num_attention_heads."""
    head_dim: Annotated[int, Field(ge=2, multiple_of=2)] | None = None
    """Width of a head; even, because rotary embeddings turn pairs."""
    intermediate_size: PositiveInt | None = None
    """Width of the MLP."""
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = None
    """One entry per draft layer; default: all full_attention."""
    sliding_window: Annotated[int, Field(gt=0, lt=1 << 31)] | None = None
    """Window of the sliding layers, in positions."""
    init_from: Name | None = None
    """The drafter that step 0 begins with: a directory on the trainer's machine (a checkpoint, a run, or one in the
    format of vLLM, SGLang or z-lab; relative to the recipe's), RUN[@STEP], RUN@best, or OWNER/NAME[@REVISION] of a hub.
    Default: drawn weights. See docs/drafters.md."""

    @model_validator(mode="after")
    def _mask_named_once(self) -> "DrafterSpec":
        if self.mask_token_id is not None and self.mask_token is not None:
            raise ValueError("mask_token_id and mask_token are both set; name the mask once")
        return self

    @model_validator(mode="after")
    def _features_agree(self) -> "DrafterSpec":
        if self.target_layer_ids is None:
            return self
        if not self.target_layer_ids or len(set(self.target_layer_ids)) != len(self.target_layer_ids):
            raise ValueError("target_layer_ids must name at least one layer, each once")
        if self.num_features not in (None, len(self.target_layer_ids)):
            raise ValueError(f"num_features is {self.num_features}, target_layer_ids has {len(self.target_layer_ids)}")
        return self

    @model_validator(mode="after")
    def _layers_agree(self) -> "DrafterSpec":
        if self.layer_types is not None and len(self.layer_types) != self.num_layers:
            raise ValueError(f"layer_types has {len(self.layer_types)} entries, num_layers is {self.num_layers}")
        slides = self.layer_types is not None and "sliding_attention" in self.layer_types
        if slides and self.sliding_window is None:
            raise ValueError("layer_types names sliding_attention, but sliding_window is not set")
        if self.sliding_window is not None and not slides:
            raise ValueError("sliding_window is set, but layer_types names no sliding_attention")
        return self

    @model_validator(mode="after")
    def _heads_divide(self) -> "DrafterSpec":
        queries, keys = self.num_attention_heads, self.num_key_value_heads
        if queries is not None and keys is not None and queries % keys:
            raise ValueError(f"num_attention_heads is {queries}, not a multiple of num_key_value_heads = {keys}")
        return self


class LossSpec(Section):
    """What is minimised over the counted slots."""

    objective: Objective = {CROSS_ENTROPY: 1.0}
    """A name, or a mix: {cross_entropy = 0.5, tv = 0.5}. All but cross_entropy compare with the target's distribution.
    See docs/objectives.md."""
    lk_eta: PositiveFloat | None = None
    """How fast lk_hybrid turns from kl to tv as acceptance grows; default: 3."""
    slot_weights: Literal["uniform", "decay", "dpace"] = "decay"
    """decay: exp(-(k-1)/gamma); dpace: arXiv 2605.18810."""
    decay_gamma: PositiveFloat | None = None
    """Default: 7 for B = 16, 5 for 10, 4 for 8, else B / 2."""
    dpace_alpha: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    chunk_rows: PositiveInt | None = None
    """Rows of logits held at once; rounded to whole blocks. Default: by a GPU's total memory; on a CPU for 64 MiB."""

    @property
    def needs_target_distribution(self) -> bool:
        """Whether the target's last hidden state is asked for."""
        return self.objective.keys() != {CROSS_ENTROPY}

    @model_validator(mode="after")
    def _eta_used(self) -> "LossSpec":
        if self.lk_eta is not None and LK_HYBRID not in self.objective:
            raise ValueError("lk_eta is set, but objective does not name lk_hybrid and would ignore it")
        return self

    @model_validator(mode="after")
    def _gamma_used(self) -> "LossSpec":
        if self.decay_gamma is not None and self.slot_weights != "decay":
            raise ValueError(f"decay_gamma is set, but slot_weights is {self.slot_weights!r} and would ignore it")
        return self


class OptimizerSpec(Section):
    """Float32 master weights, linear warm-up, a falling learning rate, clipping by global norm."""

    kind: Literal["adamw", "muon"] = "adamw"
    """muon: Muon for matrices, AdamW for norms."""
    learning_rate: PositiveFloat = 6e-4
    """Of AdamW."""
    muon_learning_rate: PositiveFloat | None = None
    """Of the matrices, with the same schedule; default: 10 x learning_rate."""
    muon_momentum: Fraction | None = None
    """Default: 0.95."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    epsilon: PositiveFloat = 1e-8
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    schedule: Literal["cosine", "linear", "wsd"] = "cosine"
    """How the learning rate falls; wsd: not before the last decay_fraction of the run, then linearly."""
    warmup_fraction: Fraction = 0.04
    """Share of the run's steps with a rising learning rate."""
    decay_fraction: Fraction | None = None
    """Share of the run's steps in which wsd falls; default: 0.2."""
    final_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Learning rate at the end, as a share of learning_rate."""
    clip_norm: PositiveFloat = 1.0
    ema_decay: Fraction | None = None
    """Keep a moving average of the weights; it, not the last weights, is then what is evaluated and exported."""

    @model_validator(mode="after")
    def _settings_used(self) -> "OptimizerSpec":
        if self.kind != "muon" and (self.muon_learning_rate, self.muon_momentum) != (None, None):
            raise ValueError(f"muon_learning_rate and muon_momentum are for kind = 'muon'; kind is {self.kind!r}")
        if self.schedule != "wsd" and self.decay_fraction is not None:
            raise ValueError(f"decay_fraction is for schedule = 'wsd'; schedule is {self.schedule!r}")
        return self


class TrainSpec(Section):
    """The training loop. The run ends at max_steps, max_tokens or epochs, whichever is set and comes first."""

    seed: Annotated[int, Field(ge=0, lt=1 << 64)] = 0
    """Initial weights, anchors. Runs that differ only here share one stream."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    """Compute precision; master weights and optimizer state are float32 always."""
    fp8: bool = False
    """Matrix products of the drafter's layers and of the head in FP8, on cards from compute capability 8.9 on; see
    docs/decisions/0011-fp8-products.md."""
    attention: Literal["flex", "sdpa"] = "flex"
    """flex: compiled flex_attention, CUDA only. sdpa: the same mask, materialised, CPU only. See `resolve_device`."""
    activation_checkpointing: StrictBool | Annotated[int, Field(strict=True, gt=0)] = False
    """Keep only what enters a draft layer, and compute the layer once more in the backward: less memory, more time, the
    same result. true: every layer; a number: so many, or all where there are fewer; the first ones, because what the
    later ones keep is used, and given back, before those are computed again."""
    cuda_graphs: Literal["auto"] | bool = "auto"
    """Record the step once and launch it as one: for small drafters, whose step is bound by launches. auto: by the
    drafter's size; the log says what was chosen and why."""
    anchors_per_pack: PositiveInt = 512
    """Anchors drawn per pack (A)."""
    feature_noise: Annotated[float, Field(ge=0.0)] = 0.0
    """Gaussian noise on the target's features in training, as a share of their root mean square."""
    packs_per_step: PositiveInt = 1
    """Packs in one optimizer step (G)."""
    max_steps: PositiveInt | None = None
    """Optimizer steps."""
    max_tokens: PositiveInt | None = None
    """Pack slots, padding included: steps x packs_per_step x pack_tokens."""
    epochs: Annotated[int, Field(gt=0, le=MAX_EPOCHS)] | None = None
    """Passes over the documents, each in another order."""
    max_not_finite_steps: PositiveInt = 3
    """The run fails with LOSS_NOT_FINITE after so many steps in a row without a finite loss."""

    @model_validator(mode="after")
    def _fp8_from_bfloat16(self) -> "TrainSpec":
        if self.fp8 and self.precision != "bfloat16":
            raise ValueError(f"fp8 rounds what is bfloat16, but precision is {self.precision!r}; set one of them")
        return self

    @model_validator(mode="after")
    def _attention_runs_there(self) -> "TrainSpec":
        if self.device == "cpu" and self.attention == "flex":
            raise ValueError(
                "attention is 'flex', but device is 'cpu', where flex_attention has no backward; set attention = 'sdpa'"
            )
        if self.device == "cuda" and self.attention == "sdpa":
            raise ValueError(
                "attention is 'sdpa', but device is 'cuda', where a materialised mask is never allowed; "
                "set attention = 'flex'"
            )
        return self

    @model_validator(mode="after")
    def _ends(self) -> "TrainSpec":
        if self.max_steps is None and self.max_tokens is None and self.epochs is None:
            raise ValueError("the run never ends: set max_steps, max_tokens or epochs")
        return self


class StreamSpec(Section):
    """How packs reach the trainer."""

    transport: Literal["auto", "grpc", "shm"] = "auto"
    """auto: shared memory where both ends share it, else gRPC; the choice is logged."""
    prefetch_packs: Annotated[int, Field(ge=2)] = 3
    """Packs held ready while a step runs."""
    start: Literal["beginning", "live", "group"] = "beginning"
    """Pack 0, the pack that the stream computes now, or pack 0 together with the other runs of a group."""
    group: Name | None = None
    """Runs of one group start together: none is served before all group_size have subscribed."""
    group_size: PositiveInt | None = None
    """Runs in the group."""
    lease_seconds: PositiveFloat = 60.0
    """A leased pack that is not confirmed by then is delivered again."""

    @model_validator(mode="after")
    def _group_complete(self) -> "StreamSpec":
        grouped = (self.group is not None, self.group_size is not None)
        if self.start == "group" and not all(grouped):
            raise ValueError("start = 'group' needs group and group_size")
        if self.start != "group" and any(grouped):
            raise ValueError(f"group and group_size are for start = 'group' only; start is {self.start!r}")
        return self


class CheckpointSpec(Section):
    """When the run is saved and how much is kept."""

    every_steps: PositiveInt = 500
    """Steps between two checkpoints; the end of the run is always saved."""
    keep: PositiveInt = 3
    """Newest checkpoints that stay on disk."""


class EvalSpec(Section):
    """Speculative decoding of held-out prompts."""

    prompts: Name | None = None
    """JSONL with one `messages` (or `prompt`) per line; relative to the recipe's directory."""
    num_prompts: PositiveInt | None = None
    """First so many prompts of every source; default: all."""
    max_new_tokens: PositiveInt = 128
    """Tokens decoded per prompt."""
    heldout: Name | None = None
    """The target's greedy answers to these prompts, made once by `slipstream data regenerate RECIPE --heldout`: with
    them, every regular checkpoint is measured while the run trains, and the best one stays. Read by trainer and target
    server; relative to the recipe's directory. See docs/evaluation.md."""
    every_steps: PositiveInt | None = None
    """Steps between two measurements on heldout; default: at every regular checkpoint. The end is always measured."""
    dtype: Dtype = "float32"
    """Precision of target and drafter while decoding; only float32 proves losslessness token for token."""
    bfloat16_gap_bound: PositiveFloat = 0.5
    """In reduced precision, a token may differ from plain decoding if the top two logits were this close."""

    @model_validator(mode="after")
    def _cadence_used(self) -> "EvalSpec":
        if self.every_steps is not None and self.heldout is None:
            raise ValueError("every_steps is set, but heldout is not, so that nothing is measured")
        return self


class RunSpec(Section):
    """One run: a drafter for a target, trained on a stream."""

    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    """Lower case letters, digits, dot, dash, underscore; at most 63; the first and last a letter or digit."""
    target: TargetSpec
    data: DataSpec
    drafter: DrafterSpec = DrafterSpec()
    train: TrainSpec
    loss: LossSpec = LossSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    stream: StreamSpec = StreamSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    eval: EvalSpec = EvalSpec()

    @property
    def recomputed_layers(self) -> int:
        """Draft layers, the first so many, that the backward computes again."""
        again = self.train.activation_checkpointing
        return self.drafter.num_layers if again is True else min(again, self.drafter.num_layers)

    @model_validator(mode="after")
    def _at_least_one_step(self) -> "RunSpec":
        step_tokens = self.train.packs_per_step * self.data.pack_tokens
        if self.train.max_tokens is not None and self.train.max_tokens < step_tokens:
            raise ValueError(
                f"train.max_tokens is {self.train.max_tokens}, less than one step of packs_per_step x pack_tokens "
                f"= {step_tokens}"
            )
        return self
