"""A run's place at its target server: handshake, subscription, incarnation, commits; and the way back after a loss.

Two threads call the server. The feeder leases and, when the connection was lost, joins again under a new incarnation;
the training thread commits. One lock, which may be held for as long as the target is away, keeps the incarnation from
changing while a commit names it. Another, never held across a call, keeps it from changing while somebody writes into
the run directory under it: what was trained is recorded and saved although the target is away.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from google.protobuf.duration_pb2 import Duration

from drafter_trainer.run_directory import RunDirectory
from drafter_trainer.wait_notice import WaitNotice
from slipstream.errors import SlipstreamError
from slipstream.hidden_states.v1 import batch_pb2
from slipstream.hidden_states.v1 import hidden_state_service_pb2 as pb
from slipstream.model_names import other_model_error, surely_differ
from slipstream.run_spec.load import canonical_json
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import RunSpec
from slipstream.telemetry.logs import log_event
from slipstream.wire.channel import TargetClient
from slipstream.wire.data_report import DataReport
from slipstream.wire.transports import PayloadReader, PayloadRef, choose_reader

_START_POSITIONS = {
    "beginning": pb.START_POSITION_BEGINNING,
    "live": pb.START_POSITION_LIVE,
    "group": pb.START_POSITION_GROUP,
}
_GREET_AGAIN_SECONDS = 1.0
# Short, so that a trainer that is told to stop does not sit in a poll for long.
_LONGEST_POLL_SECONDS = 2.0
_LARGEST = 2**63 - 1
"""That the wire carries."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Position:
    """Where a trainer process begins: from a checkpoint, or from nothing."""

    next_step: int = 0
    first_sequence_number: int | None = None
    """Recorded in the cursor; None: what the server offers."""
    quarantined: tuple[int, ...] = ()
    incarnation: int = 0
    """The newest that the run directory knows."""
    stream: str | None = None
    """The stream that the checkpoint was trained on."""


class TargetLink:
    """See the module. `handshake` and `begin` come first, from the training thread."""

    def __init__(
        self, client: TargetClient, notice: WaitNotice, spec: RunSpec, run: RunDirectory, *, pin_memory: bool
    ) -> None:
        """`notice`: the client's `on_wait`; its `over`: `on_answer`. `pin_memory`: read into page-locked memory."""
        self._client = client
        self._pin_memory = pin_memory
        self._notice = notice
        self._spec = spec
        self._run = run
        self._trainer = f"trainers/{socket.gethostname()}-{os.getpid()}"
        self._lock = threading.RLock()
        """Taken before `_owning`, if both are."""
        self._owning = threading.RLock()
        self._noting = threading.Lock()
        """Held for moments only, and taken last: a lease must come back while a commit waits."""
        self._seen_reconnects = 0
        self._must_rejoin = False
        self._next_commit = 0
        self._reader: PayloadReader | None = None
        self._layer_ids: tuple[int, ...] = ()
        self._incarnation = 0
        self.quarantined: frozenset[int] = frozenset()
        """Packs that will never be delivered; replaced, never changed, so that any thread may look."""
        self.fingerprint = ""
        self.subscription = ""
        self.stream = ""
        self.first_sequence_number = 0
        self.commit_seconds = 0.0
        """Time the training thread has spent in `commit`."""
        self.end_sequence_number: int | None = None
        """One past the last pack of the stream for this run; None when it repeats for ever."""

    # ---- joining -------------------------------------------------------------------------------------------------

    def handshake(self, expected_fingerprint: str | None = None) -> pb.GetTargetResponse:
        """Greet the target and choose how payloads are read.

        Raises:
            SlipstreamError: TARGET_INCOMPATIBLE, TARGET_FINGERPRINT_MISMATCH when it serves another model than the run
                is defined for, or than it was trained with; PROTOCOL_MISMATCH; TRANSPORT_UNAVAILABLE.
        """
        while True:
            target = self._client.get_target()
            if expected := expected_fingerprint or self.fingerprint:
                self._check_fingerprint(target, expected)
            else:
                self._check_name(target)
            try:
                reader = choose_reader(
                    self._spec.stream.transport,
                    target,
                    self._client.channel,
                    stop=self._client.stop,
                    pin_memory=self._pin_memory,
                )
                break
            except SlipstreamError as error:
                if error.reason is not Reason.LEASE_LOST:
                    raise
                # The server was restarted between its greeting and the probe: greet the new one.
                self._client.stop.wait(_GREET_AGAIN_SECONDS)
        if self._reader is not None:
            self._reader.close()
        self._reader = reader
        self._notice.greeted(reader.name)
        self.fingerprint = target.target_fingerprint
        self.max_outstanding_leases = target.max_outstanding_leases
        self._seen_reconnects = self._client.reconnects
        return target

    def begin(self, position: Position, layer_ids: Sequence[int]) -> pb.OpenSubscriptionResponse:
        """Subscribe, start a new incarnation at `position`, and claim the run directory for it.

        Raises:
            SlipstreamError: STREAM_CHANGED when the data, the layers or the packing are not those of the checkpoint.
        """
        self._layer_ids = tuple(sorted(layer_ids))
        with self._lock:
            opened = self._open(position.stream)
            first = position.first_sequence_number
            self.first_sequence_number = opened.first_sequence_number if first is None else first
            if opened.total_packs:
                self.end_sequence_number = opened.first_sequence_number + opened.total_packs
            self.quarantined = frozenset(position.quarantined)
            self._seek(position.next_step, opened.incarnation, position.incarnation)
        self._notice.opened(DataReport.model_validate_json(opened.data_report_json))
        return opened

    @property
    def must_rejoin(self) -> bool:
        """True after the connection was lost, or the server is another process: its leases are gone."""
        return self._must_rejoin or self._client.reconnects != self._seen_reconnects

    def rejoin(self, next_step: int) -> None:
        """Greet, subscribe and seek again; leases restart at `next_step` under a new incarnation.

        Raises:
            SlipstreamError: INCARNATION_STALE when another trainer has taken the run over meanwhile.
        """
        with self._lock:
            # Cleared once everything has worked: what is lost on the way is tried again.
            self._must_rejoin = True
            self.handshake()
            opened = self._open(self.stream)
            if opened.incarnation > self._incarnation:
                raise SlipstreamError(
                    f"Another trainer has taken over run {self._spec.name} (incarnation {opened.incarnation}, this one "
                    f"is {self._incarnation}) while the target was away.",
                    reason=Reason.INCARNATION_STALE,
                    remedy="Nothing was written after that. Let the newer trainer go on.",
                )
            self._seek(next_step, opened.incarnation, self._incarnation)
            self._must_rejoin = False
            log_event(_log, "info", "rejoined", incarnation=self._incarnation, next_step=next_step)

    # ---- leases: the feeder's side -------------------------------------------------------------------------------

    @property
    def reader(self) -> PayloadReader:
        """How payloads are read; chosen in the handshake."""
        assert self._reader is not None, "the handshake comes first"
        return self._reader

    def lease(self, max_packs: int, end: int = 0) -> pb.LeasePacksResponse:
        """Ask for packs; an empty answer after a while is none.

        `end`: one past the run's last pack, so that the server computes none in vain; 0: not known.
        """
        time_to_live = Duration()
        time_to_live.FromMilliseconds(round(self._spec.stream.lease_seconds * 1000))
        max_wait = Duration()
        max_wait.FromMilliseconds(round(_LONGEST_POLL_SECONDS * 1000))
        response = self._client.lease_packs(
            pb.LeasePacksRequest(
                subscription=self.subscription,
                incarnation=self._incarnation,
                trainer=self._trainer,
                max_packs=max_packs,
                max_wait=max_wait,
                time_to_live=time_to_live,
                target_fingerprint=self.fingerprint,
                transport=self.reader.transport,
                end_sequence_number=min(end, _LARGEST),
            )
        )
        self._note_quarantined(response.quarantined_sequence_numbers)
        return response

    def confirm(self, lease: batch_pb2.Lease) -> bool:
        """After the copy: was it what was leased? False: drop it, it will be delivered again."""
        generation = PayloadRef.of_lease(lease).slot_generation
        request = pb.ConfirmReadRequest(lease_token=lease.lease_token, slot_generation=generation)
        return self._client.confirm_read(request).valid

    def renew(self, tokens: Sequence[bytes]) -> set[bytes]:
        """Keep leases alive that wait to be read; returns those that are lost."""
        time_to_live = Duration()
        time_to_live.FromMilliseconds(round(self._spec.stream.lease_seconds * 1000))
        request = pb.RenewLeasesRequest(lease_tokens=tokens, time_to_live=time_to_live)
        return set(self._client.renew_leases(request).lost_lease_tokens)

    def release(self, tokens: Sequence[bytes], reason: pb.ReleaseReason) -> None:
        """Give leases back."""
        if tokens:
            self._client.release_leases(pb.ReleaseLeasesRequest(lease_tokens=tokens, reason=reason))

    def leave(self, tokens: Sequence[bytes]) -> None:
        """The run ends here: give leases back, and let nobody wait for it. Before the first seek, there is nothing."""
        if self._incarnation > 0:
            self._client.release_leases(
                pb.ReleaseLeasesRequest(
                    lease_tokens=tokens,
                    reason=pb.RELEASE_REASON_SHUTDOWN,
                    subscription=self.subscription,
                    incarnation=self._incarnation,
                )
            )

    def connection_lost(self) -> None:
        """The server does not know what it should: join again before the next lease."""
        self._must_rejoin = True

    # ---- commits and writes: the training thread's side ----------------------------------------------------------

    def commit(self, step: int) -> None:
        """Step `step` is applied. Waits while the target is away.

        Raises:
            SlipstreamError: INCARNATION_STALE when another trainer has taken the run over.
        """
        began = time.perf_counter()
        try:
            self._commit(step)
        finally:
            self.commit_seconds += time.perf_counter() - began

    def _commit(self, step: int) -> None:
        with self._lock:
            # Usually this one step. None after a lost connection, if the seek has counted it as committed already; and
            # first the one before, if that was given up while the target was away.
            for each in range(self._next_commit, step + 1):
                request = pb.CommitStepRequest(subscription=self.subscription, incarnation=self._incarnation, step=each)
                try:
                    response = self._client.commit_step(request)
                except SlipstreamError as error:
                    if error.reason not in (Reason.SUBSCRIPTION_UNKNOWN, Reason.LEASE_LOST):
                        raise
                    # The server came back without its ledger, or with an older one: its host had a power cut. The
                    # feeder subscribes and seeks anew, past this step.
                    self._must_rejoin = True
                    return
                self._next_commit = each + 1
                self._note_quarantined(response.quarantined_sequence_numbers)

    @contextmanager
    def incarnation_held(self) -> Iterator[int]:
        """The incarnation, which the feeder cannot change while the block runs: for writes into the run directory."""
        with self._owning:
            yield self._incarnation

    def close(self) -> None:
        """Stop reading payloads. The client is its owner's to close."""
        if self._reader is not None:
            self._reader.close()

    # ---- requests ------------------------------------------------------------------------------------------------

    def _check_name(self, target: pb.GetTargetResponse) -> None:
        """Of a run that has not met its target: later its fingerprint says more, whatever the hub calls it by then."""
        wanted, served = self._spec.target, (target.model_id, target.model_revision)
        if (other := surely_differ(wanted.model, wanted.revision, *served)) is not None:
            raise other_model_error(f"{self._client.address} {other}.", "Name another with --target", *served)

    def _check_fingerprint(self, target: pb.GetTargetResponse, expected: str) -> None:
        if target.target_fingerprint != expected:
            raise SlipstreamError(
                f"The target changed under run {self._spec.name}: it was trained with fingerprint {expected}, "
                f"{self._client.address} serves {target.model_id} with {target.target_fingerprint}.",
                reason=Reason.TARGET_FINGERPRINT_MISMATCH,
                remedy="Serve the same weights, tokenizer, template and dtype again, or start a new run under another "
                "name (--set name=…).",
            )

    def _open(self, expected_stream: str | None) -> pb.OpenSubscriptionResponse:
        spec = self._spec
        opened = self._client.open_subscription(
            pb.OpenSubscriptionRequest(
                run=f"runs/{spec.name}",
                data_spec_json=canonical_json(spec.data),
                layer_ids=self._layer_ids,
                last_hidden_state=spec.loss.needs_target_distribution,
                packs_per_step=spec.train.packs_per_step,
                start_position=_START_POSITIONS[spec.stream.start],
                group=spec.stream.group or "",
                group_size=spec.stream.group_size or 0,
                max_epochs=spec.train.epochs or 0,
            )
        )
        if expected_stream and opened.stream != expected_stream:
            raise SlipstreamError(
                f"The data of run {spec.name} changed: its checkpoint was trained on {expected_stream}, the recipe now "
                f"gives {opened.stream}.",
                reason=Reason.STREAM_CHANGED,
                remedy="Restore the conversation files and the [data] table, or start a new run under another name "
                "(--set name=…).",
            )
        self.subscription, self.stream = opened.subscription, opened.stream
        return opened

    def _seek(self, next_step: int, expected_incarnation: int, lineage_incarnation: int) -> None:
        response = self._client.seek_subscription(
            pb.SeekSubscriptionRequest(
                subscription=self.subscription,
                next_step=next_step,
                quarantined_sequence_numbers=sorted(self.quarantined),
                expected_incarnation=expected_incarnation,
                lineage_incarnation=lineage_incarnation,
                first_sequence_number=self.first_sequence_number,
            )
        )
        with self._owning:
            self._run.claim(response.incarnation, self._trainer)
            self._incarnation = response.incarnation
        self._next_commit = next_step
        self._seen_reconnects = self._client.reconnects

    def _note_quarantined(self, sequence_numbers: Sequence[int]) -> None:
        with self._noting:
            fresh = frozenset(sequence_numbers) - self.quarantined
            self.quarantined |= fresh
        if fresh:
            log_event(_log, "warning", "packs_quarantined", sequence_numbers=sorted(fresh))
