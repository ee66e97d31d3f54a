"""⑧ Packs from the target server, in order, on the trainer's device, fetched while the step before still runs.

A feeder thread leases, reads, copies to the device and confirms; the training thread takes whole steps. The feeder
touches streams and buffers only, never compiled code.

    lease → read (chosen transport) → draw anchors → copy to the device → confirm → ready → handed over with its step
"""

import logging
import threading
import time
from collections.abc import Mapping

from torch import Tensor

from drafter_trainer.anchors import Anchors, draw_anchors
from drafter_trainer.device_copy import DeviceCopy
from drafter_trainer.pack_buckets import bucket_of, padded_to
from drafter_trainer.target_link import TargetLink
from drafter_trainer.training_packs import PackPlan, StepBatch, TrainingPack
from slipstream.errors import SlipstreamError
from slipstream.hidden_states.v1 import batch_pb2
from slipstream.hidden_states.v1 import hidden_state_service_pb2 as pb
from slipstream.run_spec.reasons import Reason
from slipstream.telemetry.logs import log_event
from slipstream.telemetry.phase_times import PhaseTimes
from slipstream.wire.channel import WaitInterruptedError
from slipstream.wire.transports.base import PayloadRef

_STATES_IN_WORDS = {
    pb.STREAM_STATE_PAUSED: "stream_paused",
    pb.STREAM_STATE_DRAINING: "target_draining",
    pb.STREAM_STATE_WAITING_FOR_GROUP: "waiting_for_group",
}
_IDLE_SECONDS = 0.5
_CLOSE_SECONDS = 10.0

_log = logging.getLogger(__name__)


class BatchSource:
    """Hands out the steps of a run in order. `next_batch` and `close` are for the training thread."""

    def __init__(self, link: TargetLink, plan: PackPlan, copy: DeviceCopy, stop: threading.Event) -> None:
        """`stop`: set it, and call `wake`, to end all waiting."""
        self._link = link
        self._plan = plan
        self._copy = copy
        self._stop = stop
        self._changed = threading.Condition()
        self._ready: dict[int, TrainingPack] = {}
        self._next_step = 0
        self._unread: dict[bytes, batch_pb2.Lease] = {}
        self._exhausted = False
        self._failure: BaseException | None = None
        self._said_state: pb.StreamState = pb.STREAM_STATE_ACTIVE
        self._thread = threading.Thread(target=self._feed, name="batch-feeder", daemon=True)
        self.times = PhaseTimes()
        """Where the feeder's time goes."""
        self.waited_seconds = 0.0
        """Time the training thread has spent waiting in `next_batch`."""
        self.pack_bytes = 0
        """Of the pack that was read last, as it came."""

    def start(self, next_step: int) -> None:
        """Begin to fetch at the step from which the link was started."""
        self._next_step = next_step
        self._thread.start()

    def is_ready(self) -> bool:
        """True when `next_batch` would not wait."""
        with self._changed:
            return self._batch_or_end()

    def next_batch(self) -> StepBatch | None:
        """The next step's packs; None when the run was told to stop, or the stream has no whole step left.

        Raises:
            SlipstreamError: whatever ended the feeder.
        """
        began = time.monotonic()
        with self._changed:
            self._changed.wait_for(self._batch_or_end)
            self.waited_seconds += time.monotonic() - began
            if self._stop.is_set():
                return None
            if not self._complete(self._next_step):
                if self._failure is not None:
                    raise self._failure
                return None
            numbers = self._plan.sequence_numbers(self._next_step)
            packs = tuple(self._ready.pop(number) for number in numbers if number in self._ready)
            batch = StepBatch(self._next_step, packs)
            self._next_step += 1
            self._changed.notify_all()
        for pack in packs:
            self._copy.hand_over(pack.tensors)
        return batch

    def wake(self) -> None:
        """Look at `stop` again."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """End the feeder and give back what it has leased and not read."""
        self._stop.set()
        self.wake()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_SECONDS)
        try:
            self._link.leave(list(self._unread))
        except SlipstreamError as error:
            # The leases run out by themselves; leaving must work while the target is away.
            log_event(_log, "info", "leases_not_released", reason=error.reason.value)
        # Of the training thread, and of a step: beside the rest, because the same server answers.
        self.times.seconds["commit"] = self._link.commit_seconds
        self.times.log(_log, "feeder_times")

    # ---- the training thread's conditions ------------------------------------------------------------------------

    def _batch_or_end(self) -> bool:
        ended = self._stop.is_set() or self._failure is not None or self._exhausted
        return ended or self._complete(self._next_step)

    def _complete(self, step: int) -> bool:
        return step < self._plan.total_steps and all(
            number in self._ready or number in self._link.quarantined for number in self._plan.sequence_numbers(step)
        )

    # ---- the feeder ----------------------------------------------------------------------------------------------

    def _feed(self) -> None:
        try:
            while (room := self._wait_for_room()) > 0:
                if self._link.must_rejoin:
                    self._rejoin()
                self._fetch(room)
        except WaitInterruptedError:
            # The run was told to stop while the target was away.
            return
        except BaseException as error:  # noqa: BLE001 - the thread's boundary: next_batch raises it
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _wait_for_room(self) -> int:
        """Packs that may be leased now; 0 when there is nothing more to do."""
        with self.times.measured("room"), self._changed:
            self._changed.wait_for(lambda: self._stop.is_set() or self._missing() == 0 or self._room() > 0)
            return 0 if self._stop.is_set() or self._exhausted else self._room()

    def _missing(self) -> int:
        """Packs of the run that are neither handed over, nor here, nor quarantined."""
        begin = self._plan.sequence_numbers(self._next_step).start
        end = self._plan.end
        return end - begin - len(self._ready) - sum(begin <= number < end for number in self._link.quarantined)

    def _room(self) -> int:
        capacity = max(self._plan.prefetch_packs, self._plan.packs_per_step)
        return min(self._missing(), capacity - len(self._ready))

    def _rejoin(self) -> None:
        with self._changed:
            # Steps handed over will be applied; everything fetched beyond them is fetched again.
            self._ready.clear()
            self._unread.clear()
            next_step = self._next_step
        try:
            self._link.rejoin(next_step)
        except SlipstreamError as error:
            if error.reason is not Reason.SUBSCRIPTION_UNKNOWN:
                raise
            # Restarted once more on the way, without its ledger: the link still asks to be rejoined.

    def _fetch(self, room: int) -> None:
        began = time.monotonic()
        response = self._lease(min(room, self._link.max_outstanding_leases))
        if response is None or self._link.must_rejoin:
            # Whatever another process has leased to this run does not continue what was fetched so far.
            return
        leases = sorted(response.leases, key=lambda lease: lease.manifest.sequence_number)
        self._note_state(response.stream_state, len(leases))
        self._unread = {lease.lease_token: lease for lease in leases}
        read_before = began + self._plan.lease_seconds / 2
        for lease in leases:
            if self._stop.is_set():
                return
            if time.monotonic() > read_before:
                read_before += self._plan.lease_seconds / 2
                for token in self._link.renew(list(self._unread)):
                    del self._unread[token]
            if lease.lease_token in self._unread:
                self._take(lease)
        if not leases and time.monotonic() - began < _IDLE_SECONDS:
            # A server that answers at once that there is nothing (paused, draining) must not be asked in a tight loop.
            self._stop.wait(_IDLE_SECONDS)

    def _lease(self, max_packs: int) -> pb.LeasePacksResponse | None:
        try:
            with self.times.measured("lease"):
                return self._link.lease(max_packs, self._plan.end)
        except SlipstreamError as error:
            if error.reason not in (Reason.SUBSCRIPTION_UNKNOWN, Reason.LEASE_LOST):
                raise
            # Another process answers now, without the memory of this run.
            self._link.connection_lost()
            return None

    def _take(self, lease: batch_pb2.Lease) -> None:
        """Read, copy, confirm; keep the pack if all three worked. Else the server delivers it again."""
        pack = self._read(lease)
        del self._unread[lease.lease_token]
        if pack is None or not self._confirm(lease):
            log_event(_log, "info", "pack_dropped", sequence_number=lease.manifest.sequence_number)
            return
        self.times.count()
        with self._changed:
            self._ready[pack.sequence_number] = pack
            self._changed.notify_all()

    def _read(self, lease: batch_pb2.Lease) -> TrainingPack | None:
        manifest = lease.manifest
        bucket = self._bucket_of(manifest)
        with self.times.measured("read"):
            tensors = self._read_payload(PayloadRef.of_lease(lease))
        if tensors is None:
            return None
        self.pack_bytes = sum(tensor.nbytes for tensor in tensors.values())
        with self.times.measured("anchors"):
            tensors = padded_to(tensors, bucket)
            anchors = draw_anchors(
                tensors["loss_mask"],
                tensors["document_ids"],
                self._plan.num_anchors,
                self._plan.seed,
                manifest.sequence_number,
            )
        drawn = {"anchor_positions": anchors.positions, "anchor_valid": anchors.valid}
        with self.times.measured("copy"):
            moved = self._copy.to_device({**tensors, **drawn})
        return TrainingPack(manifest.sequence_number, moved, Anchors(moved["anchor_positions"], moved["anchor_valid"]))

    def _read_payload(self, reference: PayloadRef) -> Mapping[str, Tensor] | None:
        """The tensors in CPU memory. None: the lease was lost or the bytes were wrong twice; it was given back."""
        try:
            return self._link.reader.read(reference, list(self._plan.tensor_shapes))
        except SlipstreamError as error:
            if error.reason not in (Reason.PAYLOAD_CORRUPT, Reason.LEASE_LOST):
                raise
            # Given back even if it is lost already: a lease that only the server believes in would keep its pack from
            # being delivered again until it runs out, while later packs fill the room that it needs.
            if error.reason is Reason.PAYLOAD_CORRUPT:
                log_event(_log, "warning", "payload_corrupt", detail=error.message)
                self._link.release([reference.token], pb.RELEASE_REASON_PACK_CORRUPT)
            else:
                self._link.release([reference.token], pb.RELEASE_REASON_UNSPECIFIED)
        return None

    def _confirm(self, lease: batch_pb2.Lease) -> bool:
        try:
            with self.times.measured("confirm"):
                return self._link.confirm(lease)
        except SlipstreamError as error:
            if error.reason is Reason.LEASE_LOST:
                return False
            raise

    def _bucket_of(self, manifest: batch_pb2.PackManifest) -> int:
        """Tokens of the bucket that a pack is padded to.

        Raises:
            SlipstreamError: PACK_OUTSIDE_BUCKETS.
        """
        found = {spec.name: tuple(spec.shape) for spec in manifest.tensors}
        lengths = self._plan.pack_lengths
        tokens = next(iter(found.get("input_ids", ())), 0)
        bucket = bucket_of(tokens, lengths) if tokens else None
        # A length is padded only where several are declared: with one, a pack of another length is a mistake.
        expected = self._plan.shapes_of(tokens if bucket is not None and len(lengths) > 1 else lengths[-1])
        wrong = [
            f"{name} {list(found[name]) if name in found else 'missing'} (expected {list(shape)})"
            for name, shape in expected.items()
            if found.get(name) != shape
        ]
        if bucket is None or wrong:
            raise SlipstreamError(
                f"Pack {manifest.sequence_number} does not fit the compiled step: {', '.join(wrong)}. "
                f"Declared are packs of {', '.join(map(str, lengths))} tokens.",
                reason=Reason.PACK_OUTSIDE_BUCKETS,
                remedy="Packs of a run have the lengths that it declares; target server and trainer must be of the "
                "same version.",
            )
        return bucket

    def _note_state(self, state: pb.StreamState, num_leases: int) -> None:
        """Say once what the stream waits for."""
        if state == pb.STREAM_STATE_EXHAUSTED and num_leases == 0:
            with self._changed:
                self._exhausted = True
                self._changed.notify_all()
        if state != self._said_state and state in _STATES_IN_WORDS:
            log_event(_log, "info", _STATES_IN_WORDS[state], subscription=self._link.subscription)
        self._said_state = state
