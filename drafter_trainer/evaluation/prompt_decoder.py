"""Decodes prompts plainly and with each drafter: over growing caches in this process or in several, or in batches."""

import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache

import torch
from jinja2.exceptions import TemplateError

from drafter_trainer.drafter import initialise_weights
from drafter_trainer.drafter_interface import Drafter
from drafter_trainer.evaluation.batch_decoder import BatchDecoder, DecodingSetting, static_length
from drafter_trainer.evaluation.decode import BlockDrafter, CachedTarget, Decoded, decode_greedily
from drafter_trainer.evaluation.samples import token_texts
from drafter_trainer.evaluation.setting import COMPILER, PLAIN, TRAINED, UNTRAINED, DecodingPlan, Setting
from drafter_trainer.formats.opening import open_drafter
from slipstream.chat_rendering import render_chat
from slipstream.errors import SlipstreamError
from slipstream.eval_prompts import Prompt, end_ids
from slipstream.run_spec.reasons import Reason
from slipstream.target_facts import read_frozen_weights, read_target_facts
from slipstream.target_loading import LoadedTarget, decoder_layers, load_causal_lm, never_choose_padding

WARM_UP_TOKENS = 8
"""Tokens decoded once by every way before anything is timed."""


Decoding = tuple[Setting, Prompt, dict[str, Decoded]]
"""A prompt under one setting, by way of decoding."""


def decode_prompts(
    plan: DecodingPlan, prompts: Sequence[Prompt], jobs: int, begin: Callable[[int], None]
) -> Generator[Decoding, None, None]:
    """Every prompt by every way of decoding, in any order. Close the generator: its processes end with it.

    Args:
        plan: see there.
        prompts: at least one.
        jobs: processes; 1 decodes in this one. Decoding one prompt on a CPU uses one core, whatever its threads.
            With fixed caches it must be 1.
        begin: called with their number when they decode: one has loaded the target by then, several do it now.

    Raises:
        SlipstreamError: what loading the checkpoint or the target raises; DATA_INVALID, the chat template refuses a
            prompt; OUT_OF_MEMORY, a process was killed.
    """
    if jobs == 1:
        decoder = PromptDecoder.open(plan)
        begin(jobs)
        for setting in plan.settings:
            for batch in batches(prompts, setting.batch_size):
                for prompt, decoded in zip(batch, decoder.decode_batch(batch, setting), strict=True):
                    yield setting, prompt, decoded
        return
    assert not plan.fixed_caches, "several processes on one GPU would slow each other"
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin_worker)
    waiting: dict[Future[dict[str, Decoded]], Prompt] = {}
    # Not `as_completed`, which takes the lock of every future at once: left by a SIGTERM in there, the pool never ends.
    ended: queue.SimpleQueue[Future[dict[str, Decoded]]] = queue.SimpleQueue()
    try:
        for prompt in prompts:
            future = pool.submit(_decode_in_worker, plan, prompt)
            waiting[future] = prompt
            future.add_done_callback(ended.put)
        begin(jobs)
        while waiting:
            done = ended.get()
            yield plan.settings[0], waiting.pop(done), done.result()
    except BrokenProcessPool as error:
        raise SlipstreamError(
            "a decoding process was killed, most often because the machine's memory is full",
            reason=Reason.OUT_OF_MEMORY,
            remedy="Lower --jobs: every process holds the target.",
        ) from error
    finally:
        if waiting:
            # Nobody waits any more for what they are decoding, which may take minutes.
            for worker in multiprocessing.active_children():
                worker.terminate()
        pool.shutdown(wait=True, cancel_futures=True)


def batches(prompts: Sequence[Prompt], size: int) -> Iterator[list[Prompt]]:
    """So many prompts at once, all of one source; a source's last batch may have fewer."""
    by_source: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_source.setdefault(prompt.source, []).append(prompt)
    for of_source in by_source.values():
        for start in range(0, len(of_source), size):
            yield of_source[start : start + size]


def _begin_worker() -> None:
    """Leave with the parent: at its word, not at a Ctrl-C that the terminal sends to all; and where it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, name="leave-with-parent", daemon=True).start()


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _decode_in_worker(plan: DecodingPlan, prompt: Prompt) -> dict[str, Decoded]:
    return _worker_decoder(plan).decode(prompt)


@cache
def _worker_decoder(plan: DecodingPlan) -> "PromptDecoder":
    return PromptDecoder.open(plan)


class PromptDecoder:
    """One target with its drafters.

    Args:
        target: loaded, evaluation mode.
        drafters: by label; all for this target, on its device and in its dtype.
        max_new_tokens: per prompt.
        plan: where decoding is not greedy, one prompt at a time, over growing caches.
    """

    def __init__(
        self,
        target: LoadedTarget,
        drafters: Mapping[str, Drafter],
        max_new_tokens: int,
        plan: DecodingPlan | None = None,
    ) -> None:
        self.target, self.drafters, self.max_new_tokens = target, dict(drafters), max_new_tokens
        self._plan = plan
        self._batch_decoders: dict[tuple[str, Setting, int], BatchDecoder] = {}
        self._end_ids = end_ids(target)
        self._embedding = target.model.get_input_embeddings().weight
        self._head = target.model.get_output_embeddings().weight
        self._warm = False

    @classmethod
    def open(cls, plan: DecodingPlan) -> "PromptDecoder":
        """Load what the plan names.

        Raises:
            SlipstreamError: CHECKPOINT_INVALID; MODEL_INVALID; TARGET_INCOMPATIBLE, they do not belong together.
        """
        torch.set_num_threads(plan.threads)
        # The small file first: a damaged checkpoint is found before minutes are spent on the target.
        opened = open_drafter(plan.checkpoint)
        target = load_causal_lm(plan.target, plan.device)
        never_choose_padding(target)
        target_config = read_target_facts(target.model, target.tokenizer).config
        config = opened.for_target(target, target_config, end_ids(target))
        drafters = {}
        if plan.untrained_seed is not None:
            drafters[UNTRAINED] = config.build()
            final_norm = read_frozen_weights(target.model, target_config)["norm.weight"]
            initialise_weights(drafters[UNTRAINED], plan.untrained_seed, final_norm.float())
        drafters[TRAINED] = config.build()
        drafters[TRAINED].load_state_dict(opened.weights)
        placed = {
            name: drafter.to(target.model.device, target.model.dtype).eval() for name, drafter in drafters.items()
        }
        return cls(target, placed, plan.max_new_tokens, plan)

    def decode_batch(self, prompts: Sequence[Prompt], setting: Setting) -> list[dict[str, Decoded]]:
        """Prompts at once by every way of decoding; see `decode`.

        Raises:
            SlipstreamError: DATA_INVALID; OUT_OF_MEMORY, the caches do not fit; MODEL_INVALID, the target cannot
                decode over fixed caches; ENVIRONMENT_UNSUPPORTED, its rounds cannot be captured.
        """
        if self._plan is None or not self._plan.fixed_caches:
            return [self.decode(prompt) for prompt in prompts]
        ids = [self._ids(prompt) for prompt in prompts]
        try:
            by_way = {label: self._decode_at_once(label, ids, setting) for label in (PLAIN, *self.drafters)}
        except torch.OutOfMemoryError as error:
            raise SlipstreamError(
                f"the caches of {setting.batch_size} prompts do not fit into the memory of {self.target.model.device}",
                reason=Reason.OUT_OF_MEMORY,
                remedy="Lower --batch-sizes or --max-new-tokens.",
            ) from error
        rows = ({label: decoded[row] for label, decoded in by_way.items()} for row in range(len(prompts)))
        return [self._with_texts(row) for row in rows]

    def _decode_at_once(self, label: str, ids: list[torch.Tensor], setting: Setting) -> list[Decoded]:
        assert self._plan is not None
        block = max((drafter.config.block_size for drafter in self.drafters.values()), default=1)
        length = static_length(max(map(len, ids)) + self.max_new_tokens + block)
        key = (label, setting, length)
        if key not in self._batch_decoders:
            # Caches of another setting are not needed again.
            self._batch_decoders = {k: kept for k, kept in self._batch_decoders.items() if k[1] == setting}
            wanted = DecodingSetting(
                rows=setting.batch_size,
                max_length=length,
                temperature=setting.temperature,
                seed=self._plan.sampling_seed,
                graphs=self._plan.graphs,
                compiler=COMPILER if self._plan.compiled else None,
            )
            self._batch_decoders[key] = BatchDecoder(self.target.model, self.drafters.get(label), wanted)
        return self._batch_decoders[key].decode(ids, self.max_new_tokens, self._end_ids)

    def decode(self, prompt: Prompt) -> dict[str, Decoded]:
        """One prompt by every way of decoding, by label; plain decoding under PLAIN.

        Raises:
            SlipstreamError: DATA_INVALID, the chat template refuses the prompt.
        """
        ids = self._ids(prompt)
        if not self._warm:
            self._decode_all_ways(ids, WARM_UP_TOKENS)
            self._warm = True
        return self._with_texts(self._decode_all_ways(ids, self.max_new_tokens))

    def _with_texts(self, by_way: dict[str, Decoded]) -> dict[str, Decoded]:
        if self._plan is not None and self._plan.with_texts:
            for label in self.drafters:
                by_way[label].texts = token_texts(self.target.tokenizer, by_way[label].tokens)
        return by_way

    def _ids(self, prompt: Prompt) -> torch.Tensor:
        ids = self.target.tokenizer(self._rendered(prompt), add_special_tokens=False)["input_ids"]
        most = getattr(self.target.model.config.get_text_config(), "max_position_embeddings", None)
        if most is not None and len(ids) + self.max_new_tokens > most:
            raise SlipstreamError(
                f"prompt {prompt.id} has {len(ids)} tokens and is to get {self.max_new_tokens} more, "
                f"the target reads {most}",
                reason=Reason.DATA_INVALID,
                remedy="Shorten the prompt, lower --max-new-tokens, or take it out of the file.",
            )
        return torch.tensor(ids, device=self.target.model.device)

    def _rendered(self, prompt: Prompt) -> str:
        try:
            return render_chat(self.target.tokenizer, prompt.messages, as_prompt=True)
        except (TemplateError, TypeError, ValueError) as error:
            raise SlipstreamError(
                f"the target's chat template refuses prompt {prompt.id}: {error}",
                reason=Reason.DATA_INVALID,
                remedy="Change its messages (some templates take no system message), or remove it.",
            ) from error

    def _decode_all_ways(self, ids: torch.Tensor, max_new_tokens: int) -> dict[str, Decoded]:
        ways: dict[str, Drafter | None] = {PLAIN: None, **self.drafters}
        return {label: self._decode(ids, drafter, max_new_tokens) for label, drafter in ways.items()}

    def _decode(self, ids: torch.Tensor, drafter: Drafter | None, max_new_tokens: int) -> Decoded:
        layer_ids = drafter.config.target_layer_ids if drafter is not None else ()
        cached = CachedTarget(self.target.model, decoder_layers(self.target.model), layer_ids)
        block = BlockDrafter(drafter, self._embedding, self._head) if drafter is not None else None
        try:
            return decode_greedily(cached, block, ids, max_new_tokens, self._end_ids)
        finally:
            cached.close()
