"""Everything that trainers, operators, the engine and time can do to a lease ledger, beside a simple model of it."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from target_server.lease_book import DeliveryState
from target_server.lease_ledger import STRIKES_TO_QUARANTINE, SeekTo
from target_server.lineage import lineage_report
from target_server.subscription import Lease
from tests.fakes.ledger_desk import STREAM, LedgerDesk
from tests.unit.target_server import ledger_invariants
from tests.unit.target_server.ledger_model import NUM_PACKS, RUNS, TIME_TO_LIVE, ModelRun

runs = st.sampled_from(sorted(RUNS))


class LedgerMachine(RuleBasedStateMachine):
    """The ledger beside its model."""

    @initialize(num_slots=st.integers(2, 6), ahead=st.sampled_from((0, 2)))
    def start(self, num_slots: int, ahead: int) -> None:
        self.num_slots, self.ahead = num_slots, ahead
        # In memory where possible: thousands of synchronous writes are not what is tested here.
        self.directory = tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        self.ledger_file = Path(self.directory.name) / "ledger.sqlite"
        self.desk = self.open_desk()
        self.runs: dict[str, ModelRun] = {}
        self.unusable: set[int] = set()
        """Packs that an engine of the present server has set aside."""

    def open_desk(self) -> LedgerDesk:
        return LedgerDesk(
            self.ledger_file, num_slots=self.num_slots, num_packs=NUM_PACKS, max_outstanding=4, ahead=self.ahead
        )

    def name(self, run: str) -> str:
        return f"subscriptions/{run}"

    def seek_to(self, run: str, step: int) -> None:
        model = self.runs[run]
        model.void += [lease for lease, _ in model.leases.values()]
        model.leases.clear()
        boundary = step * model.packs_per_step  # a checkpoint knows of the packs before it
        model.quarantined = {number for number in model.quarantined if number < boundary}
        incarnation = self.desk.seek(self.name(run), step, quarantined=frozenset(model.quarantined))
        assert incarnation > model.incarnation
        model.quarantined |= {number for number in self.unusable if number >= boundary}
        model.strikes.clear()
        model.incarnation, model.cursor = incarnation, step
        model.delivered = set(range(step * model.packs_per_step))

    @rule(run=runs)
    def join(self, run: str) -> None:
        if run not in self.runs:
            self.runs[run] = ModelRun(RUNS[run])
            self.desk.open(run, packs_per_step=RUNS[run])
            self.seek_to(run, 0)

    def known(self) -> bool:
        return bool(self.runs)

    @precondition(known)
    @rule(run=runs, back=st.integers(0, 12))
    def seek(self, run: str, back: int) -> None:
        """Resume from the present step or from an earlier checkpoint."""
        if run in self.runs:
            self.seek_to(run, max(0, self.runs[run].cursor - back))

    @precondition(known)
    @rule(run=runs, packs=st.integers(1, 5), end=st.sampled_from((None, 1, NUM_PACKS)))
    def lease(self, run: str, packs: int, end: int | None = None) -> None:
        """`end` is the trainer's word, right or wrong: it changes nothing of what is delivered."""
        if run not in self.runs:
            return
        model, now = self.runs[run], self.desk.now
        try:
            grant = self.desk.ask(self.name(run), model.incarnation, packs, time_to_live=TIME_TO_LIVE, end=end)
        except SlipstreamError as error:
            assert error.reason is Reason.LEASE_QUOTA_EXCEEDED
            assert len(model.valid(now)) >= 4
            return
        cursor = model.cursor * model.packs_per_step
        assert grant.quarantined == tuple(sorted(number for number in model.quarantined if number >= cursor))
        expected = model.undelivered(now)
        for lease, number in zip(grant.leases, expected, strict=False):
            assert lease.sequence_number == number, "strictly in order"
            assert lease.step == number // model.packs_per_step
            model.leases[lease.token] = (lease, now + TIME_TO_LIVE)
        assert len(grant.leases) <= len(expected)
        if model.paused:
            assert grant.state is DeliveryState.PAUSED and not grant.leases
        else:
            assert (grant.state is DeliveryState.EXHAUSTED) == model.exhausted

    def pick(self, run: str, index: int) -> Lease | None:
        model = self.runs.get(run)
        if model is None or not model.leases:
            return None
        return list(model.leases.values())[index % len(model.leases)][0]

    @precondition(known)
    @rule(run=runs, index=st.integers(0, 9), right=st.booleans())
    def confirm(self, run: str, index: int, right: bool) -> None:
        lease = self.pick(run, index)
        if lease is None:
            return
        model = self.runs[run]
        _, ends = model.leases.pop(lease.token)
        valid = self.desk.ledger.confirm(lease.token, lease.facts.generation + (0 if right else 2))
        assert valid == (right and ends > self.desk.now and not model.is_done(lease.sequence_number))
        if valid:
            model.delivered.add(lease.sequence_number)

    @precondition(known)
    @rule(run=runs, index=st.integers(0, 9))
    def confirm_void(self, run: str, index: int) -> None:
        model = self.runs.get(run)
        if model is None or not model.void:
            return
        lease = model.void[index % len(model.void)]
        try:
            self.desk.ledger.confirm(lease.token, lease.facts.generation)
        except SlipstreamError as error:
            assert error.reason is Reason.INCARNATION_STALE
        else:
            raise AssertionError("a lease of an older incarnation was confirmed")

    @precondition(known)
    @rule(run=runs, verb=st.sampled_from(["lease", "commit", "seek"]), older=st.integers(1, 3))
    def old_incarnation(self, run: str, verb: str, older: int) -> None:
        """A trainer that was taken over gets nothing and changes nothing."""
        model = self.runs.get(run)
        if model is None or older >= model.incarnation:
            return
        name, incarnation = self.name(run), model.incarnation - older
        try:
            if verb == "lease":
                self.desk.ask(name, incarnation, 1)
            elif verb == "commit":
                self.desk.ledger.commit(name, incarnation, model.cursor)
            else:
                self.desk.ledger.seek(name, SeekTo(0, 0, expected_incarnation=incarnation))
        except SlipstreamError as error:
            assert error.reason is Reason.INCARNATION_STALE
        else:
            raise AssertionError(f"{verb} of an older incarnation was taken")

    @precondition(known)
    @rule()
    def restart(self) -> None:
        """kill -9 of the server; it comes back with the ledger's file, and trainers go on without a seek."""
        self.unusable.clear()
        now, paused = self.desk.now, {run: model.paused for run, model in self.runs.items()}
        self.desk.close()
        self.desk = self.open_desk()
        self.desk.pass_time(now)
        for run, model in self.runs.items():
            record = self.desk.book.subscriptions[self.name(run)].record
            assert (record.incarnation, record.next_step) == (model.incarnation, model.cursor)
            assert record.paused == paused[run]
            assert record.quarantined == model.quarantined
            model.strikes.clear()
            self.desk.open(run, packs_per_step=RUNS[run])
            model.of_other_servers += [lease for lease, _ in model.leases.values()] + model.void
            model.leases.clear()
            model.void.clear()
            model.delivered = set(range(model.cursor * model.packs_per_step))

    @precondition(known)
    @rule(run=runs, index=st.integers(0, 9))
    def confirm_of_another_server(self, run: str, index: int) -> None:
        model = self.runs.get(run)
        if model is None or not model.of_other_servers:
            return
        lease = model.of_other_servers[index % len(model.of_other_servers)]
        try:
            self.desk.ledger.confirm(lease.token, lease.facts.generation)
        except SlipstreamError as error:
            assert error.reason is Reason.LEASE_LOST
        else:
            raise AssertionError("a lease of another server was confirmed")

    @precondition(known)
    @rule(run=runs)
    def close_and_open(self, run: str) -> None:
        """An operator closes the run; whoever trained it is fenced off, and it begins anew."""
        model = self.runs.get(run)
        if model is None:
            return
        name = self.name(run)
        self.desk.control.close(name)
        for call in (lambda: self.desk.ask(name, model.incarnation), lambda: self.desk.ledger.renew(model.leases, 1.0)):
            try:
                call()
            except SlipstreamError as error:
                assert error.reason is Reason.STREAM_CLOSED
        self.desk.open(run, packs_per_step=RUNS[run])
        model.incarnation += 1
        model.paused = False
        model.quarantined.clear()
        self.seek_to(run, 0)

    @precondition(known)
    @rule(run=runs, index=st.integers(0, 9))
    def release(self, run: str, index: int) -> None:
        lease = self.pick(run, index)
        if lease is not None:
            del self.runs[run].leases[lease.token]
            self.desk.ledger.release([lease.token], pack_at_fault=False)

    @precondition(known)
    @rule(run=runs, index=st.integers(0, 9))
    def reject(self, run: str, index: int) -> None:
        """What was read is not what it should be."""
        lease = self.pick(run, index)
        if lease is None:
            return
        model, number = self.runs[run], lease.sequence_number
        _, ends = model.leases.pop(lease.token)
        counts = ends > self.desk.now and not model.is_done(number)
        set_aside = self.desk.ledger.release([lease.token], pack_at_fault=True)
        model.strikes[number] += counts
        assert set_aside == ([lease] if counts and model.strikes[number] >= STRIKES_TO_QUARANTINE else [])
        assert not counts or self.desk.shelf.ready(number) is not lease.slot, "it would get the same bytes again"
        if set_aside:
            model.quarantined.add(number)

    @precondition(known)
    @rule(run=runs)
    def commit(self, run: str) -> None:
        """Commit the next step once all its packs are delivered, as a trainer does."""
        model = self.runs.get(run)
        if model is not None and model.next_step_is_done:
            answer = self.desk.ledger.commit(self.name(run), model.incarnation, model.cursor)
            assert answer == sorted(model.quarantined)
            model.cursor += 1

    @precondition(known)
    @rule(run=runs, verb=st.sampled_from(["commit", "seek", "pause"]))
    def full_disk(self, run: str, verb: str) -> None:
        """What cannot be written has not happened: everything after it shows that."""
        model, name = self.runs.get(run), self.name(run)
        if model is None or (verb == "commit" and not model.next_step_is_done):
            return
        calls = {
            "commit": lambda: self.desk.ledger.commit(name, model.incarnation, model.cursor),
            "seek": lambda: self.desk.seek(name, 0),
            "pause": lambda: self.desk.control.pause(name),
        }
        with self.desk.unwritable(), pytest.raises(SlipstreamError, match="locked"):
            calls[verb]()

    @precondition(known)
    @rule(finite=st.booleans())
    def engine_fails(self, finite: bool) -> None:
        """An engine dies with a pack, or finds that it cannot be computed; what lay in the slot is gone."""
        work = self.desk.queue.next_work(0.0)
        if work is None:
            return
        self.desk.slot_contents[work.slot.index] = -1
        if finite:
            self.desk.queue.abandon(work)
            return
        self.desk.queue.quarantine(work, ("c17",))
        self.unusable.add(work.sequence_number)
        for model in self.runs.values():
            if work.sequence_number < model.limit and not model.is_done(work.sequence_number):
                model.quarantined.add(work.sequence_number)

    @rule(packs=st.integers(1, 3))
    def engine(self, packs: int) -> None:
        self.desk.work(packs)

    @rule(seconds=st.sampled_from([1.0, 9.0, 21.0, 31.0]))
    def wait(self, seconds: float) -> None:
        self.desk.pass_time(seconds)

    @precondition(known)
    @rule(run=runs, paused=st.booleans())
    def pause(self, run: str, paused: bool) -> None:
        if run in self.runs:
            (self.desk.control.pause if paused else self.desk.control.resume)(self.name(run))
            self.runs[run].paused = paused

    @invariant()
    def leased_slots_keep_their_pack(self) -> None:
        for model in getattr(self, "runs", {}).values():
            ledger_invariants.leased_slots_keep_their_pack(self.desk, model)

    @invariant()
    def nothing_is_leaked(self) -> None:
        if hasattr(self, "desk"):
            ledger_invariants.nothing_is_leaked(self.desk)

    @invariant()
    def the_shelf_keeps_its_bound(self) -> None:
        if hasattr(self, "desk"):
            ledger_invariants.the_shelf_keeps_its_bound(self.desk)

    @precondition(known)
    @rule()
    def idle_engine(self) -> None:
        """The engine has nothing left to do."""
        self.desk.work()
        ledger_invariants.who_waits_has_its_slots(self.desk)

    def teardown(self) -> None:
        """Whatever happened: every run can be finished, and the ledger proves that every pack counted once."""
        if not hasattr(self, "desk"):
            return
        stuck = self.runs and sorted(self.runs)[0]
        for run, model in self.runs.items():
            self.desk.control.resume(self.name(run))
            if run != stuck:
                self.seek_to(run, model.cursor)
        if stuck:
            self.finish_without(stuck)
            self.seek_to(stuck, self.runs[stuck].cursor)
        self.finish_all()
        for run, model in self.runs.items():
            report = lineage_report(self.ledger_file, run)
            assert report.exactly_once, report
            assert (report.first_sequence_number, report.next_sequence_number) == (0, model.limit)
            assert model.quarantined.issuperset(report.quarantined), "the lineage has what its cursor has"
        counters = self.desk.control.counters(STREAM)  # of the last server
        assert counters.packs_computed == len(self.desk.computed)
        assert counters.packs_recomputed == len(self.desk.computed) - len(set(self.desk.computed))
        self.desk.close()
        self.directory.cleanup()

    def finish_without(self, stuck: str) -> None:
        """One run holds what it has got and never calls again: the others finish once it counts as away."""
        if self.can_ask(stuck):
            self.desk.ask(self.name(stuck), self.runs[stuck].incarnation)
        for _ in range(2):  # its leases run out, and so does the time for which it is missed
            self.desk.pass_time(max(TIME_TO_LIVE, 61.0))
        self.finish_all(besides=stuck)

    def can_ask(self, run: str) -> bool:
        """Whether another lease would stay within the run's quota."""
        return len(self.desk.book.subscriptions[self.name(run)].leased) < 4

    def finish_all(self, besides: str = "") -> None:
        """No deadlock: as long as any run has packs to come, a round of all runs delivers one, or trains a step."""
        pending = {
            run
            for run, model in self.runs.items()
            if run != besides and model.cursor * model.packs_per_step < model.limit
        }
        while pending:
            delivered = 0
            for run in sorted(pending):
                model = self.runs[run]
                got = self.desk.get(self.name(run), model.incarnation, model.packs_per_step)
                model.delivered.update(got)
                before = model.cursor
                self.commit(run)
                delivered += len(got) + model.cursor - before
                if model.exhausted and model.cursor * model.packs_per_step == model.limit:
                    pending.remove(run)
            assert delivered or not pending, f"no progress with {pending} pending"
