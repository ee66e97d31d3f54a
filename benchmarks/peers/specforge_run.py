"""SpecForge 0.2.0's DFlash trained from start to end, with the target in its process: the peer of benchmarks/quality.

    python -m benchmarks.peers.specforge_run --model M --conversations C --out DIR --seconds 210

What is SpecForge's: the draft model, its training model (anchors, attention, chunked loss), `TrainerCore`, backend and
`BF16Optimizer` (AdamW on float32 masters), the shuffle of every epoch, batches padded to their longest document, and
the settings of its DFlash recipes: blocks of 16, 4 conversations a step, learning rate 6e-4, 4 % warm-up, cosine,
clipping at 1.0, up to 512 anchors a conversation, decay 7. Its online mode asks an SGLang server for features; here the
target runs in the same process, on the same GPU, in bf16.

What is done for it: token ids, masks, architecture and mask token are ours, so that only training differs; the target's
layers behind the last captured one do not run, nor does its head; right padding needs no attention mask, so that the
target keeps its fast attention; what compiles does so before the clock starts, also for changing lengths; its rotary
frequencies stay float32 (its trainer rounds them to bf16, engines do not); the cosine follows the clock to exactly the
end. Before training, its proposals are compared with those of our drafter over the exported weights.
"""

import argparse
import json
import logging
import random
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers.qwen3 import round_parameters
from benchmarks.peers.side import SideUnavailableError
from benchmarks.peers.specforge import VERSION
from drafter_trainer.drafter_config import DFlashConfig, resolve_drafter_config
from drafter_trainer.schedule import learning_rate
from slipstream.run_spec.load import load_recipe
from slipstream.run_spec.spec import DataSpec, OptimizerSpec, TargetSpec
from slipstream.target_facts import read_target_facts
from slipstream.target_loading import LoadedTarget, decoder_layers, decoder_of, load_causal_lm

ANCHORS = 512
MAX_TOKENS = 3072
"""Of a document, as in its recipes."""
SEED = 42
WARM_UP_STEPS = 24
CHECKED_PREFIXES = 24
LEAST_EQUAL = 0.98
"""Of the proposals. Near-ties may fall either way; a wrong slot or layer leaves next to none."""
RECOMPILES = 64
"""Its own attention module allows so many; transformers' that this model uses, eight."""
RESOLUTION = 1_000_000

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Document:
    """Tokens of one conversation."""

    token_ids: Tensor
    """int64 [L]"""
    loss_mask: Tensor
    """int64 [L]"""


class InProcessTarget:
    """The target without its head, giving the features of a padded batch."""

    def __init__(self, loaded: LoadedTarget, layer_ids: Sequence[int]) -> None:
        self._decoder: Any = decoder_of(loaded.model)
        layers = decoder_layers(loaded.model)
        self._captured: dict[int, Tensor] = {}
        for layer in layer_ids:
            layers[layer].register_forward_hook(self._capture(layer))
        self._layer_ids = tuple(layer_ids)
        self._decoder.layers = layers[: max(layer_ids) + 1]

    def _capture(self, layer_id: int) -> Any:
        def hook(_module: nn.Module, _inputs: object, output: Any) -> None:
            self._captured[layer_id] = output if isinstance(output, Tensor) else output[0]

        return hook

    @torch.no_grad()
    def features(self, token_ids: Tensor) -> Tensor:
        """[N, L, n·D] of token ids [N, L]; padding stands behind a row's end, where nothing before it sees it."""
        self._decoder(input_ids=token_ids, use_cache=False)
        return torch.cat([self._captured.pop(layer) for layer in self._layer_ids], dim=-1)


class ClockedOptimizer:
    """Makes its `BF16Optimizer`, and turns that one's cosine from steps into time."""

    def __init__(self, spec: OptimizerSpec, seconds: float) -> None:
        self._spec, self._seconds = spec, seconds
        self.made: Any = None
        self.began = time.monotonic()

    def __call__(self, module: nn.Module) -> Any:
        """Called by its backend."""
        from specforge.optimizer import BF16Optimizer

        self.made = BF16Optimizer(
            module, lr=self._spec.learning_rate, max_grad_norm=self._spec.clip_norm, total_steps=RESOLUTION
        )
        self.made.scheduler = self
        self.step()
        return self.made

    @property
    def share(self) -> float:
        """Of the time."""
        return (time.monotonic() - self.began) / self._seconds

    def step(self) -> None:
        """Set the rate of the next update; its optimizer calls this after every one."""
        virtual = min(int(self.share * RESOLUTION), RESOLUTION - 1)
        for group in self.made.optimizer.param_groups:
            group["lr"] = learning_rate(self._spec, virtual, RESOLUTION)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--conversations", type=Path, required=True)
    parser.add_argument("--recipe", type=Path, default=Path("recipes/smollm2-135m-1gpu.toml"), help="of the drafter")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="gets drafter/ and run.json")
    parser.add_argument("--seconds", type=float, default=210.0)
    parser.add_argument("--batch", type=int, default=4, help="conversations of a step")
    parser.add_argument("--learning-rate", type=float, default=6e-4)
    parser.add_argument("--block-size", type=int, help="default: the recipe's")
    parser.add_argument("--loss-type", choices=("dflash", "dpace"), default="dflash")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    # The parent starts its children with signals held; this one is to end as soon as the time is over.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s")
    try:
        import specforge  # noqa: F401 - told before minutes are spent on the target
    except ImportError as error:
        raise SystemExit(
            f"specforge cannot be imported ({error}): pip install --no-deps specforge=={VERSION}"
        ) from error
    args.out.mkdir(parents=True, exist_ok=True)
    report = Run(args).train()
    (args.out / "run.json").write_text(json.dumps(report, indent=2) + "\n")
    return 0


class Run:
    """Target, drafter, documents; and the training over them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._cuda = args.device == "cuda"
        torch.manual_seed(SEED)
        torch._dynamo.config.recompile_limit = RECOMPILES
        recipe = load_recipe(args.recipe).spec
        target = TargetSpec(model=args.model, dtype="bfloat16" if self._cuda else "float32")
        self._loaded = load_causal_lm(target, args.device)
        facts = read_target_facts(self._loaded.model, self._loaded.tokenizer).config
        changed = {} if args.block_size is None else {"block_size": args.block_size}
        config = resolve_drafter_config(recipe.drafter.model_copy(update=changed), facts)
        assert isinstance(config, DFlashConfig), "the peer's model is a DFlash drafter"
        self.config = config
        self._documents = read_documents(args.conversations, self._loaded.tokenizer)
        self.model = build_model(self.config, self._loaded, args)
        self._target = InProcessTarget(self._loaded, self.config.target_layer_ids)
        self._core: Any = None
        self._tokens = self._slots = self._steps = 0

    def train(self) -> dict[str, Any]:
        """Warm up, train for the seconds, export; returns what happened."""
        # Proposals of drawn weights differ from another's in every slot, those of a trained one agree by luck as well.
        checked = self._check_conversion()
        first = {name: tensor.detach().clone() for name, tensor in self.model.draft_model.state_dict().items()}
        self._begin(seconds=1e9)
        batches = self._batches(epoch_offset=1000)
        for _ in range(WARM_UP_STEPS if self._cuda else 1):
            self._step(next(batches))
        self.model.draft_model.load_state_dict(first)
        self._tokens = self._slots = self._steps = 0
        _log.info("warmed up")
        clock = self._begin(self._args.seconds)
        milliseconds, losses = [], []
        batches = self._batches()
        began = clock.began = time.monotonic()
        while clock.share < 1.0:
            before = time.monotonic()
            losses.append(self._step(next(batches)))
            milliseconds.append(1e3 * (time.monotonic() - before))
        if self._cuda:
            torch.cuda.synchronize()
        seconds = time.monotonic() - began
        self.model.draft_model.save_pretrained(self._args.out / "drafter")
        last = losses[-max(1, len(losses) // 20) :]
        return {
            "steps": self._steps,
            "tokens": self._tokens,
            "padded_tokens": self._slots,
            "seconds": seconds,
            "tokens_per_second": self._tokens / seconds,
            "step_ms": statistics.median(milliseconds),
            "last_loss": statistics.fmean(last),
            "epochs": self._steps * self._args.batch / len(self._documents),
            "conversion": checked,
            "peak_reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if self._cuda else None,
            "versions": {"specforge": VERSION, "torch": torch.__version__},
        }

    def _begin(self, seconds: float) -> ClockedOptimizer:
        """A fresh optimizer around the weights as they are."""
        from specforge.training.backend import FSDPTrainingBackend, ParallelConfig
        from specforge.training.controller import TrainerCore
        from specforge.training.strategies.base import DFlashTrainStrategy

        spec = OptimizerSpec(learning_rate=self._args.learning_rate, warmup_fraction=0.04, clip_norm=1.0)
        clocked = ClockedOptimizer(spec, seconds)
        backend = FSDPTrainingBackend(ParallelConfig(), optimizer_factory=clocked)
        backend.prepare_model(self.model, wrap=False, optimizer_target=self.model.draft_model)
        self._core = TrainerCore(DFlashTrainStrategy(self.model), backend)
        return clocked

    def _step(self, batch: tuple[Tensor, Tensor, int]) -> float:
        from specforge.runtime.contracts import TrainBatch

        token_ids, loss_mask, tokens = batch
        token_ids = token_ids.to(self._args.device, non_blocking=True)
        tensors = {
            "input_ids": token_ids,
            "hidden_states": self._target.features(token_ids),
            "loss_mask": loss_mask.to(self._args.device, non_blocking=True),
        }
        result = self._core.train_step(TrainBatch([str(self._steps)], "dflash", tensors))
        self._steps += 1
        self._tokens += tokens
        self._slots += token_ids.numel()
        return float(result.loss)

    def _batches(self, epoch_offset: int = 0) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Padded token ids and masks [N, L], how many tokens are no padding; a short rest of an epoch is dropped."""
        epoch, size = epoch_offset, self._args.batch
        while True:
            order = list(range(len(self._documents)))
            random.Random(SEED + epoch).shuffle(order)
            for start in range(0, len(order) - size + 1, size):
                chosen = [self._documents[index] for index in order[start : start + size]]
                ids = nn.utils.rnn.pad_sequence([one.token_ids for one in chosen], batch_first=True)
                mask = nn.utils.rnn.pad_sequence([one.loss_mask for one in chosen], batch_first=True)
                pinned = (ids.pin_memory(), mask.pin_memory()) if self._cuda else (ids, mask)
                yield *pinned, sum(len(one.token_ids) for one in chosen)
            epoch += 1

    def _check_conversion(self) -> dict[str, Any]:
        """Its proposals behind prefixes of a conversation, against those of our drafter over its exported weights.

        Raises:
            SystemExit: they differ; then a comparison would measure the conversion.
        """
        from drafter_trainer.evaluation.decode import BlockDrafter
        from drafter_trainer.formats.module import as_module
        from drafter_trainer.formats.opening import open_drafter

        draft = self.model.draft_model
        directory = self._args.out / "first-weights"
        draft.save_pretrained(directory)
        device = torch.device(self._args.device)
        weights = open_drafter(directory).weights
        ours = as_module(self.config, weights).to(device).eval()
        embedding = self.model.embed_tokens.weight.float()
        head = self.model.lm_head.weight.float()
        ids = max((one.token_ids for one in self._documents[:256]), key=len).to(device)
        features = self._target.features(ids[None]).float()[0]
        attention, dtype = draft.config._attn_implementation, draft.fc.weight.dtype
        draft.config._attn_implementation = "sdpa"
        draft.float().eval()
        step = max(1, (len(ids) - self.config.block_size) // CHECKED_PREFIXES)
        equal = slots = 0
        with torch.no_grad():
            for length in range(1, len(ids) - self.config.block_size, step):
                block = BlockDrafter(ours, embedding, head)
                block.extend(features[:length])
                drafts = block.propose(int(ids[length]))
                hidden = self._peer_block(draft, embedding, features[:length], int(ids[length]))
                equal += int((hidden @ head.t()).argmax(-1).eq(drafts).sum())
                slots += len(drafts)
        draft.config._attn_implementation = attention
        round_parameters(draft, dtype)
        draft.train()
        if equal < LEAST_EQUAL * slots:
            raise SystemExit(
                f"the peer's drafter and its conversion propose the same token in {equal} of {slots} slots"
            )
        return {"equal_proposals": equal, "slots": slots}

    def _peer_block(self, draft: Any, embedding: Tensor, features: Tensor, token: int) -> Tensor:
        """Its hidden states [B - 1, D] of the masked slots behind `token`."""
        size, mask = self.config.block_size, self.config.mask_token_id
        tokens = torch.tensor([token, *[mask] * (size - 1)], device=features.device)
        positions = torch.arange(len(features) + size, device=features.device)
        hidden = draft(
            position_ids=positions[None], noise_embedding=embedding[tokens][None], target_hidden=features[None]
        )
        return hidden[0, 1:]


def read_documents(conversations: Path, tokenizer: Any) -> list[Document]:
    """Token ids and masks as our target server makes them, without those that its filter drops."""
    from specforge.data.loss_mask import has_consecutive_supervised_tokens

    from target_server.data_files import find_files
    from target_server.dataset import load_documents

    spec = DataSpec(files=(str(conversations.resolve()),), pack_tokens=MAX_TOKENS)
    table = load_documents(spec, tokenizer, files=find_files(spec.files, None), split="train").documents
    found = []
    for index in range(len(table)):
        one = table[index]
        if has_consecutive_supervised_tokens(one.loss_mask):
            found.append(Document(torch.tensor(one.token_ids).long(), torch.tensor(one.loss_mask).long()))
    return found


def build_model(config: DFlashConfig, loaded: LoadedTarget, args: argparse.Namespace) -> Any:
    """Its training model around the target's own tables, weights in the target's dtype.

    Raises:
        SideUnavailableError: a family whose embedding or logits it does not reproduce.
    """
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel
    from transformers import Qwen3Config

    if config.embedding_scale != 1.0 or config.logit_soft_cap is not None:
        raise SideUnavailableError("SpecForge's DFlash scales no embeddings and caps no logits")
    # flex_attention has no backward on a CPU.
    attention = "flex_attention" if args.device == "cuda" else "sdpa"
    shape = Qwen3Config(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        num_hidden_layers=config.num_layers,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        layer_types=list(config.layer_types),
        attention_bias=False,
        tie_word_embeddings=False,
    )
    shape._attn_implementation = attention
    shape.num_target_layers, shape.block_size = config.num_target_layers, config.block_size
    shape.dflash_config = {"target_layer_ids": list(config.target_layer_ids), "mask_token_id": config.mask_token_id}
    model, dtype = loaded.model, loaded.model.dtype
    with torch.device(args.device):
        draft = DFlashDraftModel(shape)
    round_parameters(draft, dtype)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    for table in (embedding, head):
        table.weight.requires_grad_(False)
    training = OnlineDFlashModel(
        draft_model=draft,
        target_lm_head=head,
        target_embed_tokens=embedding,
        mask_token_id=config.mask_token_id,
        block_size=config.block_size,
        attention_backend=attention,
        num_anchors=ANCHORS,
        loss_decay_gamma=7.0,
        loss_type=args.loss_type,
    )
    return training.train()


if __name__ == "__main__":
    sys.exit(main())
