"""The feeder of one run at a real target server; faults may be put between it and the payloads."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from drafter_trainer.batch_source import BatchSource
from drafter_trainer.device_copy import DeviceCopy
from drafter_trainer.run_directory import RunDirectory
from drafter_trainer.target_link import Position, TargetLink
from drafter_trainer.training_packs import PackPlan, payload_shapes
from drafter_trainer.wait_notice import WaitNotice
from slipstream.errors import SlipstreamError
from slipstream.run_spec.load import load_recipe
from slipstream.run_spec.reasons import Reason
from slipstream.wire.channel import TargetClient
from slipstream.wire.codec import ByteArray
from slipstream.wire.transports.base import ByteRun, PayloadReader, PayloadRef

CPU = torch.device("cpu")
LAYERS = (1, 2)
SHAPES = payload_shapes([f"hidden_states.{layer}" for layer in LAYERS], 128, 64)


class FaultyReader(PayloadReader):
    """The real reader, but some packs fail before they are read: faults per sequence number, used up in turn."""

    def __init__(self, inner: PayloadReader, faults: dict[int, list[Callable[[], None]]]) -> None:
        super().__init__()
        self.name, self.transport = inner.name, inner.transport
        self._inner = inner
        self._faults = faults

    def read(self, ref: PayloadRef, names: Sequence[str]) -> dict[str, Tensor]:
        faults = self._faults.get(ref.manifest.sequence_number)
        if faults:
            faults.pop(0)()
        return self._inner.read(ref, names)

    def _fill(self, ref: PayloadRef, run: ByteRun, buffer: ByteArray) -> None:
        self._inner._fill(ref, run, buffer)

    def close(self) -> None:
        self._inner.close()


def refusing(reason: Reason) -> Callable[[], None]:
    def fail() -> None:
        raise SlipstreamError("injected", reason=reason)

    return fail


class FeederDesk:
    """One run's feeder, opened by `start`."""

    def __init__(self, recipe: Path, address: str, directory: Path) -> None:
        self._recipe, self._directory = recipe, directory
        self.notice = WaitNotice(address)
        self.client = TargetClient(address, on_wait=self.notice, on_answer=self.notice.over)
        self.stop = threading.Event()
        self.source: BatchSource | None = None

    def join(self, name: str, *settings: str) -> TargetLink:
        spec = load_recipe(self._recipe, [f"name={name}", *settings]).spec
        self.spec = spec
        run = RunDirectory(self._directory)
        link = TargetLink(self.client, self.notice, spec, run, pin_memory=False)
        link.handshake()
        link.begin(Position(incarnation=run.newest_incarnation()), LAYERS)
        return link

    def start(
        self, name: str, *settings: str, faults: dict[int, list[Callable[[], None]]] | None = None
    ) -> tuple[TargetLink, BatchSource]:
        link = self.join(name, *settings)
        if faults:
            link._reader = FaultyReader(link.reader, faults)
        train, stream = self.spec.train, self.spec.stream
        assert train.max_steps is not None
        plan = PackPlan(
            first_sequence_number=link.first_sequence_number,
            packs_per_step=train.packs_per_step,
            total_steps=train.max_steps,
            tensor_shapes=SHAPES,
            num_anchors=train.anchors_per_pack,
            seed=train.seed,
            prefetch_packs=stream.prefetch_packs,
            lease_seconds=stream.lease_seconds,
        )
        self.source = BatchSource(link, plan, DeviceCopy(CPU), self.stop)
        self.source.start(0)
        return link, self.source

    def close(self) -> None:
        if self.source is not None:
            self.source.close()
        self.client.close()
