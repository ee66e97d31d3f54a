"""How far a target is with its answers, said every ten seconds: a batch of long answers takes minutes."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria

from slipstream.telemetry.logs import log_event

EVERY_SECONDS = 10.0
_LOOK_SECONDS = 1.0
_SLACK_SECONDS = 1.5
"""Who decodes says it better than who looks from outside, and goes first."""

_logger = logging.getLogger(__name__)


class AnsweringProgress:
    """Prompts that are answered, tokens a second, seconds left."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self.begin(0)

    def begin(self, total: int, already_answered: int = 0) -> None:
        """`total`: prompts, those that are answered already included; those that cannot be used may be among them."""
        self.total, self._before = total, already_answered
        self._prompts = self._tokens = 0
        """Of the batches that are done."""
        self._tokens_under_way = 0
        self._began = self._said = self._batch_ended = self._clock()

    def batch_done(self, prompts: int, tokens: int) -> None:
        """So many more are answered, with so many tokens."""
        self._prompts += prompts
        self._tokens += tokens
        self._tokens_under_way = 0
        self._batch_ended = self._clock()

    def token_done(self, tokens: Callable[[], int]) -> None:
        """A batch has one token more; `tokens` counts all of it, and is called where they are to be told."""
        if self._is_due(EVERY_SECONDS):
            self._tokens_under_way = tokens()
            self._say()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within, it is said as well while there is no token: to read a batch of long prompts may take minutes."""
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.wait(_LOOK_SECONDS):
                self.look()

        watcher = threading.Thread(target=watch, name="answering-progress", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            is_over.set()
            watcher.join()

    def look(self) -> None:
        """Say it if no token did."""
        if self._is_due(EVERY_SECONDS + _SLACK_SECONDS):
            self._say()

    def _is_due(self, seconds: float) -> bool:
        """True for one caller; then it counts as said."""
        with self._lock:
            now = self._clock()
            if now < self._said + seconds:
                return False
            self._said = now
            return True

    def _say(self) -> None:
        log_event(_logger, "info", "answering", **self.figures())

    def figures(self) -> dict[str, Any]:
        """For a line of the log."""
        now = self._clock()
        seconds = max(now - self._began, 1e-9)
        done = self._before + self._prompts
        left = None
        if self._prompts:
            a_prompt = (self._batch_ended - self._began) / self._prompts
            left = round(max(0.0, (self.total - done) * a_prompt - (now - self._batch_ended)))
        return {
            "prompts": f"{done}/{self.total}",
            "tokens_per_second": round((self._tokens + self._tokens_under_way) / seconds, 1),
            "seconds_left": left,
        }


class EveryToken(StoppingCriteria):
    """Stops nothing: it is how `generate` tells of its tokens."""

    def __init__(self, progress: AnsweringProgress, count: Callable[[Tensor], int]) -> None:
        """`count`: tokens of the answers among those of the batch, [prompts, tokens]."""
        self._progress = progress
        self._count = count

    def __call__(self, input_ids: Tensor, _scores: Any, **_unused: Any) -> Tensor:
        """A token of every prompt is there."""
        self._progress.token_done(lambda: self._count(input_ids))
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
