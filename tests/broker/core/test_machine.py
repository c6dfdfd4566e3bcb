"""Hypothesis drives the core: joins, pushes, duplicates, reconnections and deaths in any order.

After each event the core's own invariants hold; after each step of the machine no push is in any chunk
twice, versions never go back, and the ledger says exactly what is contained. At the end, whatever has
happened, the workers that are left can finish a round: nobody waits for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from diloco_broker.core.events import Received
from diloco_protocol.bitmap import Bitmap
from diloco_protocol.messages import Credit, Grant, Pull, Standing, Welcome
from kit.core_harness import Puppet, a_stage

CHUNKS = 3
IDS = ("a", "b", "c")
# How contributions are reduced, by the number of workers.
MODES: dict[str, Callable[[int], dict[str, Any]]] = {
    "streaming": lambda workers: {},
    "deterministic": lambda workers: {"deterministic": True},
    "quorum": lambda workers: {"quorum": workers, "grace": 3.0},
    "quorum, late dropped": lambda workers: {"quorum": workers, "grace": 3.0, "late": "drop"},
    "async": lambda workers: {"mode": "async", "staging_slots": 1, "staging_deadline": 20.0},
}


class BrokerLife(RuleBasedStateMachine):
    """Three worker ids, each with at most one living process; at least one of them must contribute."""

    def __init__(self) -> None:
        super().__init__()
        self.living: dict[str, Puppet] = {}
        self.next_push = 0
        self.counter = -1
        self.whole: set[tuple[str, int]] = set()

    @initialize(
        workers=st.integers(1, 2), floor=st.integers(1, 2), how=st.sampled_from(sorted(MODES))
    )
    def start(self, workers: int, floor: int, how: str) -> None:
        self.how = how
        floors = {} if how == "async" else {"min_workers": floor}
        self.stage = a_stage(
            workers=max(workers, floor),
            chunks=CHUNKS,
            by_hand=True,
            heartbeat_timeout=50.0,
            **floors,
            **MODES[how](max(workers, floor)),
        )
        self.joins("a")

    # What workers do.

    @rule(worker_id=st.sampled_from(IDS))
    def joins(self, worker_id: str) -> None:
        """A new process, unless one lives: it knows nothing of earlier lives."""
        if worker_id in self.living:
            return
        puppet = self.stage.worker(worker_id).joins()
        if puppet.last(Welcome) is None:
            return  # its predecessor is not known to be gone yet
        self.living[worker_id] = puppet
        self.stage.provide()
        self.stage.work()
        puppet.pulls()

    @rule(worker_id=st.sampled_from(IDS))
    def comes_back(self, worker_id: str) -> None:
        """The connection breaks; the same process joins again with its session."""
        puppet = self.living.get(worker_id)
        if puppet is not None:
            puppet.loses_connection()
            puppet.joins()

    @rule(worker_id=st.sampled_from(IDS), is_known=st.booleans())
    def dies(self, worker_id: str, is_known: bool) -> None:
        """Killed. The broker finds out now, or whenever it sends something."""
        puppet = self.living.pop(worker_id, None)
        if puppet is None:
            return
        if is_known:
            puppet.dies()
        else:
            self.stage.gone |= {puppet.control, puppet.bulk}

    @rule(worker_id=st.sampled_from(IDS))
    def leaves(self, worker_id: str) -> None:
        puppet = self.living.pop(worker_id, None)
        if puppet is not None:
            puppet.leaves()

    @rule(worker_id=st.sampled_from(IDS), is_new=st.booleans(), weight=st.sampled_from([0.5, 1, 7]))
    def offers(self, worker_id: str, is_new: bool, weight: float) -> None:
        """A new push, or the last one again."""
        puppet = self.living.get(worker_id)
        if puppet is None:
            return
        if is_new or not puppet.push_id:
            self.next_push += 1
            puppet.base = self.stage.version()
            puppet.begins(self.next_push, weight=weight)
        else:
            puppet.begins(puppet.push_id, weight=weight)

    @rule(
        worker_id=st.sampled_from(IDS),
        indexes=st.lists(st.integers(0, CHUNKS - 1), min_size=1, max_size=4),
        is_finite=st.sampled_from([True, True, True, False]),
    )
    def delivers(self, worker_id: str, indexes: list[int], is_finite: bool) -> None:
        puppet = self.living.get(worker_id)
        if puppet is not None and puppet.push_id:
            puppet.delivers(indexes, is_finite=is_finite)

    @rule(worker_id=st.sampled_from(IDS))
    def commits(self, worker_id: str) -> None:
        """It says that all has been sent, which need not have arrived, nor be true."""
        puppet = self.living.get(worker_id)
        if puppet is not None and puppet.push_id:
            puppet.commits()

    @rule(worker_id=st.sampled_from(IDS), age=st.integers(1, 3), index=st.integers(0, CHUNKS - 1))
    def delivers_late(self, worker_id: str, age: int, index: int) -> None:
        """A chunk of an earlier push that was still under way."""
        puppet = self.living.get(worker_id)
        if puppet is not None and puppet.push_id:
            now, puppet.push_id = puppet.push_id, max(1, puppet.push_id - age)
            puppet.delivers([index])
            puppet.push_id = now

    @rule(worker_id=st.sampled_from(IDS), credit=st.integers(0, 4))
    def reads(self, worker_id: str, credit: int) -> None:
        puppet = self.living.get(worker_id)
        if puppet is not None:
            puppet.sends(Pull(0, self.counter, puppet.token()))
            puppet.sends(Credit(credit, puppet.token()))

    @rule(after=st.integers(-1, 3), credit=st.integers(0, 4))
    def somebody_looks(self, after: int, credit: int) -> None:
        self.stage.happens(Received(self.stage.route(), Pull(0, after, credit=credit)))

    @rule(worker_id=st.sampled_from(IDS))
    def beats(self, worker_id: str) -> None:
        if worker_id in self.living:
            self.living[worker_id].beats()

    # What goes on at the broker.

    @rule(pieces=st.integers(1, 4))
    def works(self, pieces: int) -> None:
        self.stage.work(pieces)

    @rule(seconds=st.sampled_from([0.5, 2.0, 30.0]))
    def time_passes(self, seconds: float) -> None:
        self.stage.passes(seconds)

    # What always holds.

    @invariant()
    def no_push_is_in_a_chunk_twice(self) -> None:
        if self._has_version():
            for chunk in self.stage.counted():
                assert not chunk or max(chunk.values()) == 1, chunk

    @invariant()
    def versions_never_go_back(self) -> None:
        if self._has_version():
            counter = self.stage.version().counter
            assert counter >= self.counter
            self.counter = counter

    @invariant()
    def ledger_says_exactly_what_is_contained(self) -> None:
        if not self._has_version():
            return
        chunks: list[Counter[tuple[str, int]]] = self.stage.counted()
        ledger = self.stage.ledger
        for worker_id, pushes in ledger.pushes.items():
            for counted in pushes:
                standing = ledger.standing(worker_id, counted.push_id, CHUNKS)
                contained = Bitmap(CHUNKS)
                for index, chunk in enumerate(chunks):
                    if (worker_id, counted.push_id) in chunk:
                        contained.add(index)
                for index in set(standing) - set(contained):
                    # Of a push that was given up, which stands in for this one.
                    pushes_in = {push for worker, push in chunks[index] if worker == worker_id}
                    assert self.how == "streaming" and min(pushes_in) < counted.push_id
                    contained.add(index)
                assert standing == contained

    @invariant()
    def staged_pushes_count_whole_or_not_at_all(self) -> None:
        if self._has_version() and self.how != "streaming":
            first, *others = self.stage.counted()
            assert all(chunk == first for chunk in others)

    @invariant()
    def slots_bound_what_is_kept(self) -> None:
        if self._has_version() and self.how == "async":
            assert len(list(self.stage.state.submissions)) <= 1

    @invariant()
    def readers_hold_only_what_is_current(self) -> None:
        if self._has_version():
            self.stage.core.check_invariants()

    @precondition(lambda self: self._has_version())
    @rule()
    def life_goes_on(self) -> None:
        self._finish_a_round()

    def teardown(self) -> None:
        if hasattr(self, "stage"):
            self.stage.passes(60.0)  # whoever died unseen is evicted; the living are told to rejoin
            for puppet in self.living.values():
                puppet.joins(session=None)
            for worker_id in IDS:
                self.joins(worker_id)
            self._finish_a_round()

    def _finish_a_round(self) -> None:
        """Everybody alive delivers all of a push: then a round ends, if enough are here."""
        before = self.stage.version().counter
        self.stage.passes(60.0)
        alive = list(self.living.values())
        for puppet in alive:
            puppet.joins(session=puppet.session)
        for _attempt in range(2):
            for puppet in alive:
                if self._waits_or_is_done(puppet):
                    continue
                self.next_push += 1
                puppet.base = self.stage.version()
                puppet.begins(self.next_push)
                puppet.completes()
                self.stage.work()
            for puppet in alive:
                puppet.completes()
                self.stage.work()
        floor = self.stage.state.floor if self.stage.round.barrier else 0
        if alive and len(alive) >= floor:
            assert self.stage.version().counter > before, self.stage.round

    def _waits_or_is_done(self, puppet: Puppet) -> bool:
        grant = puppet.last(Grant)
        return grant is not None and grant.standing is Standing.WAIT

    def _has_version(self) -> bool:
        return hasattr(self, "stage") and self.stage.state.is_running


TestBrokerLife = pytest.mark.slow(BrokerLife.TestCase)
TestBrokerLife.settings = settings(
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
