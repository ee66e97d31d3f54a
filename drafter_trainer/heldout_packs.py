"""Hidden states of the held-out answers: a subscription of their own, read once before training, kept in host memory.

The target server reads the same file as the trainer and packs it like training data. Once all packs are here the
subscription is closed: it pins nothing, and an evaluation needs no target. A process that was killed while it read has
left it open; the next one takes it over.
"""

import hashlib
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from google.protobuf.duration_pb2 import Duration
from torch import Tensor

from drafter_trainer.target_link import TargetLink
from slipstream.errors import SlipstreamError
from slipstream.heldout_rows import HeldoutRow, HeldoutRows
from slipstream.hidden_states.v1 import batch_pb2, stream_admin_service_pb2
from slipstream.hidden_states.v1 import hidden_state_service_pb2 as pb
from slipstream.machine_probe import memory_bytes
from slipstream.run_spec.load import canonical_json
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import DataSpec, RunSpec
from slipstream.telemetry.logs import log_event
from slipstream.wire.channel import TargetClient, WaitInterruptedError
from slipstream.wire.data_report import DataReport
from slipstream.wire.transports import PayloadRef

_PACKS_AT_ONCE = 4
_POLL_SECONDS = 2.0
_IDLE_SECONDS = 0.5
_LARGEST_SHARE = 0.5
"""Of the host's free memory; the rest is for training."""
_TRY_AGAIN = (Reason.LEASE_LOST, Reason.SUBSCRIPTION_UNKNOWN, Reason.INCARNATION_STALE, Reason.STREAM_CLOSED)
"""The server was restarted, or another trainer of this run reads the same: subscribe again, go on where it was."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeldoutAnswer:
    """One answer inside a pack."""

    source: str
    positions: range
    """Tokens behind which a block may start: all of the answer but its last."""


@dataclass(frozen=True)
class HeldoutPack:
    """One pack in host memory: tensors by their names in the payload, and the answers that lie in it, in order."""

    tensors: Mapping[str, Tensor]
    answers: tuple[HeldoutAnswer, ...]


@dataclass(frozen=True)
class HeldoutStream:
    """What is asked of the target server."""

    spec: RunSpec
    layer_ids: tuple[int, ...]
    """Ascending."""
    shapes: Mapping[str, tuple[int, ...]]
    """Every tensor that is read of a pack, with its shape."""

    @property
    def run(self) -> str:
        """The name under which the packs are read: always the same one for a run, and that of no other."""
        return f"heldout-{hashlib.sha256(self.spec.name.encode()).hexdigest()[:16]}"

    @property
    def data_spec_json(self) -> str:
        """The file as a stream, which all runs that are measured on it share, whatever layers they read."""
        assert self.spec.eval.heldout is not None
        pack_tokens = self.spec.data.pack_tokens
        return canonical_json(DataSpec(files=(self.spec.eval.heldout,), format="tokens", pack_tokens=pack_tokens))


def read_heldout_packs(
    client: TargetClient, link: TargetLink, stream: HeldoutStream, rows: HeldoutRows
) -> list[HeldoutPack]:
    """All packs of the held-out answers. Waits while the target is away; `client.stop` ends it.

    Args:
        client: connected.
        link: after its handshake; its reader reads the payloads.
        stream: what to read.
        rows: the file as this process read it.

    Raises:
        SlipstreamError: DATA_INVALID, the server reads another file or cannot use a row; OUT_OF_MEMORY, the packs do
            not fit into the host's memory; what the server refuses.
    """
    reader = _Reader(client, link, stream)
    while not reader.complete:
        try:
            reader.read()
        except SlipstreamError as error:
            if error.reason is Reason.STREAM_CHANGED:
                reader.close()  # an earlier process of this run had another file, or other layers
            elif error.reason not in _TRY_AGAIN:
                raise
            if client.stop.wait(_IDLE_SECONDS):
                raise WaitInterruptedError from error
            link.handshake()
    packs = [reader.packs[number] for number in sorted(reader.packs)]
    log_event(
        _log, "info", "heldout_read", packs=len(packs), answers=len(rows.rows), sources=", ".join(rows.sources),
        mib=round(sum(map(_bytes_of, packs)) / 2**20, 1),
    )  # fmt: skip
    return list(find_answers(packs, rows, reader.report))


class _Reader:
    def __init__(self, client: TargetClient, link: TargetLink, stream: HeldoutStream) -> None:
        self._client, self._link, self._stream = client, link, stream
        self._name = f"subscriptions/{stream.run}"
        self._served = ""
        self.packs: dict[int, dict[str, Tensor]] = {}
        self.total: int | None = None
        self.report = ""

    @property
    def complete(self) -> bool:
        return self.total is not None and len(self.packs) == self.total

    def read(self) -> None:
        """From the first pack that is missing to the end."""
        opened = self._client.open_subscription(self._request())
        if opened.stream != self._served:
            self.packs.clear()
        self._served, self.total, self.report = opened.stream, opened.total_packs, opened.data_report_json
        self._require_memory(opened.total_packs)
        sought = self._client.seek_subscription(
            pb.SeekSubscriptionRequest(
                subscription=opened.subscription,
                next_step=next((number for number in range(self.total) if number not in self.packs), self.total),
                expected_incarnation=opened.incarnation,
                lineage_incarnation=opened.incarnation,
            )
        )
        reconnects = self._client.reconnects
        while not self.complete:
            if self._client.stop.is_set():
                raise WaitInterruptedError
            self._lease(opened.subscription, sought.incarnation)
            if self._client.reconnects != reconnects:
                raise SlipstreamError("The target server was away.", reason=Reason.LEASE_LOST)
        self.close()

    def close(self) -> None:
        try:
            self._client.close_subscription(stream_admin_service_pb2.CloseSubscriptionRequest(subscription=self._name))
        except SlipstreamError as error:
            # It pins nothing once it counts as away.
            log_event(_log, "info", "heldout_not_closed", reason=error.reason.value)

    def _lease(self, subscription: str, incarnation: int) -> None:
        response = self._client.lease_packs(
            pb.LeasePacksRequest(
                subscription=subscription,
                incarnation=incarnation,
                trainer="trainers/heldout",
                max_packs=min(_PACKS_AT_ONCE, self._link.max_outstanding_leases),
                max_wait=_duration(_POLL_SECONDS),
                time_to_live=_duration(self._stream.spec.stream.lease_seconds),
                target_fingerprint=self._link.fingerprint,
                transport=self._link.reader.transport,
            )
        )
        if response.quarantined_sequence_numbers:
            raise SlipstreamError(
                f"The target's hidden states of {len(response.quarantined_sequence_numbers)} packs of held-out answers "
                "are not finite, or cannot be read.",
                reason=Reason.DATA_INVALID,
                remedy="The server's log names the rows: take their prompts out and make the file anew.",
            )
        for lease in response.leases:
            self._take(lease)
        if not response.leases:
            self._client.stop.wait(_IDLE_SECONDS)

    def _take(self, lease: batch_pb2.Lease) -> None:
        reference = PayloadRef.of_lease(lease)
        try:
            # Copies: for a GPU they lie in the slot itself, which is the server's again once the read is confirmed.
            tensors = {
                name: tensor.clone()
                for name, tensor in self._link.reader.read(reference, list(self._stream.shapes)).items()
            }
        except SlipstreamError as error:
            if error.reason is not Reason.PAYLOAD_CORRUPT:
                raise
            reason = pb.RELEASE_REASON_PACK_CORRUPT
            self._client.release_leases(pb.ReleaseLeasesRequest(lease_tokens=[reference.token], reason=reason))
            return
        request = pb.ConfirmReadRequest(lease_token=reference.token, slot_generation=reference.slot_generation)
        if not self._client.confirm_read(request).valid:
            return
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        assert found == dict(self._stream.shapes), found
        self.packs[lease.manifest.sequence_number] = tensors

    def _request(self) -> pb.OpenSubscriptionRequest:
        return pb.OpenSubscriptionRequest(
            run=f"runs/{self._stream.run}",
            data_spec_json=self._stream.data_spec_json,
            layer_ids=self._stream.layer_ids,
            packs_per_step=1,
            start_position=pb.START_POSITION_BEGINNING,
            max_epochs=1,
        )

    def _require_memory(self, total: int) -> None:
        shapes = self._stream.shapes.values()
        # Four bytes are more than any tensor's element has.
        needed = total * sum(4 * torch.Size(shape).numel() for shape in shapes)
        available = memory_bytes()[1] + sum(map(_bytes_of, self.packs.values()))
        if needed > _LARGEST_SHARE * available:
            raise SlipstreamError(
                f"The held-out answers fill {total} packs, whose hidden states take up to {needed / 2**30:.1f} GiB of "
                f"the host's memory; {available / 2**30:.1f} GiB are free, of which half may be used.",
                reason=Reason.OUT_OF_MEMORY,
                remedy="Lower eval.num_prompts or eval.max_new_tokens and make the file of eval.heldout anew.",
            )


def find_answers(packs: Sequence[Mapping[str, Tensor]], rows: HeldoutRows, report_json: str) -> Iterator[HeldoutPack]:
    """Packs with their answers: a document is known by its tokens.

    Raises:
        SlipstreamError: DATA_INVALID, a document is no row, or a row is in no pack.
    """
    waiting: dict[tuple[int, ...], list[HeldoutRow]] = defaultdict(list)
    for row in rows.rows:
        waiting[row.token_ids].append(row)
    for pack in packs:
        answers = []
        for begin, end in _documents(pack["document_ids"]):
            same = waiting.get(tuple(pack["input_ids"][begin:end].tolist()))
            if not same:
                raise SlipstreamError(
                    "The target server reads held-out answers that are not those in this trainer's file.",
                    reason=Reason.DATA_INVALID,
                    remedy="eval.heldout is read by both: it must be the same file where the two run.",
                )
            row = same.pop(0)
            answers.append(HeldoutAnswer(row.source, range(begin + row.answer_start, end - 1)))
        yield HeldoutPack(pack, tuple(answers))
    missing = [row for same in waiting.values() for row in same if row.num_drafted]
    if missing:
        why = "; ".join(DataReport.model_validate_json(report_json).summary_lines())
        raise SlipstreamError(
            f"The target server has {len(missing)} of {len(rows.rows)} held-out answers in no pack ({why}).",
            reason=Reason.DATA_INVALID,
            remedy="Take these prompts out of eval.prompts and make the file of eval.heldout anew.",
        )


def _documents(document_ids: Tensor) -> Iterator[tuple[int, int]]:
    """(begin, end) of every document of a pack, in order; padding has the id -1 and lies behind them."""
    ids = document_ids.tolist()
    borders = [place for place in range(len(ids)) if place == 0 or ids[place] != ids[place - 1]]
    for begin, end in pairwise([*borders, len(ids)]):
        if ids[begin] >= 0:
            yield begin, end


def _bytes_of(pack: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in pack.values())


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromMilliseconds(round(1000 * seconds))
    return duration
