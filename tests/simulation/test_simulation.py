"""Whole runs in all modes: workers die, restart, leave and join, and the network breaks.

Every run is one real core and many real sessions in virtual time (`simulator`), and every promise is
checked after every event (`referee`). A failure names its seed and recounts the last events.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import pytest

from diloco_broker.core.effects import Effect, Step
from diloco_broker.core.machine import Core
from diloco_broker.core.members import seeding
from diloco_broker.core.members.members import Member
from diloco_broker.core.rounds import asynchronous, collect, sequence, streaming
from diloco_broker.core.rounds.round import Update
from diloco_broker.core.rounds.streaming import StreamingRound
from diloco_broker.core.rounds.submissions import Submission
from diloco_broker.core.state import RunState
from diloco_broker.core.versions import checkpoints
from diloco_broker.core.versions.checkpoints import run_record
from diloco_broker.core.versions.record import Resumption, RunRecord
from diloco_broker.storage import resume
from diloco_protocol.bitmap import Bitmap
from diloco_protocol.messages import Push
from diloco_protocol.version import Ledger, VersionId
from kit.core_harness import a_config
from simulation.fragments import Fragments
from simulation.residuals import Residuals
from simulation.scenarios import MODES, WEATHERS, a_scenario
from simulation.simulator import BUSY, Scenario, Simulation
from simulation.standby import HUB
from simulation.tensors import Violation
from simulation.troubles import NO_TROUBLES, Troubles
from simulation.units import counted, times_contained

T = TypeVar("T")


def in_turn(number: int, streams: bool) -> pytest.MarkDecorator:
    """Of two cases that differ in `streams` one is slow and the other nightly, in turn.

    async-stale has an even number: with fragments it takes ten times as long until a slow worker
    counts.
    """
    return pytest.mark.slow if number % 2 == streams else pytest.mark.nightly


# Each mode with the whole model and with fragments.
EACH_MODE = [
    pytest.param(mode, streams, marks=in_turn(number, streams))
    for number, mode in enumerate(MODES)
    for streams in (False, True)
]
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2))]
ADOPT, DURABLE, REWIND = 1, 2, 3  # of `SAVING`; 0 saves nothing


def with_relays(scenario: Scenario) -> Scenario:
    """They die, are cut off, and workers move between them and the hub."""
    troubles = replace(scenario.troubles, relay_kills=0.05, relay_cuts=0.04, moves=0.05)
    config = replace(scenario.config, relays=True)
    tree = {"north": "hub", "south": "hub", "deep": "south"}
    return replace(scenario, config=config, relays=tree, troubles=troubles)


def with_standby(scenario: Scenario) -> Scenario:
    """The hub is killed and cut off for longer than its lease, and its standby is killed as well."""
    troubles = replace(scenario.troubles, restarts=0.03, orderly=0.0, restart_s=6.0)
    troubles = replace(troubles, hub_cuts=0.03, splits=0.03, standby_kills=0.02)
    config = replace(scenario.config, standby=True, lease=3.0)
    return replace(scenario, config=config, troubles=troubles)


def of_several_processes(scenario: Scenario) -> Scenario:
    return replace(scenario, processes=(1, 2, 3), chunks=5)


class Kind(NamedTuple):
    """A kind of run, and which of its modes are quick; the others, with more versions, take longer."""

    made: Callable[[Scenario], Scenario]
    quick: Collection[str]
    seeds: int  # all but the first at night
    saved: int | None = None

    def mark(self, mode: str, streams: bool, seed: int) -> list[pytest.MarkDecorator]:
        if seed:
            return [pytest.mark.nightly]
        return [] if mode in self.quick else [in_turn(list(MODES).index(mode), streams)]


KINDS = {
    "one broker": Kind(lambda each: each, [m for m in MODES if not m.startswith("async")], 3),
    "relays": Kind(with_relays, ("streaming", "deterministic"), 6),  # the two ways to combine
    "standby": Kind(with_standby, ("streaming",), 4, ADOPT),
    "several processes": Kind(of_several_processes, (), 2),
}


@pytest.mark.parametrize(
    ("kind", "mode", "streams", "seed"),
    [
        pytest.param(name, mode, streams, seed, marks=kind.mark(mode, streams, seed))
        for name, kind in KINDS.items()
        for mode in MODES
        for streams in (False, True)
        for seed in range(kind.seeds)
    ],
)
def test_every_promise_holds_through_troubles(
    kind: str, mode: str, streams: bool, seed: int
) -> None:
    scenario = KINDS[kind].made(a_scenario(mode, streams, seed, KINDS[kind].saved))
    run = Simulation(scenario, seed).run()
    assert run.referee.versions_made > 0
    assert run.counted() > 0
    if kind == "several processes":
        assert {process.habits.processes for process in run.processes} >= {2, 3}


def instances(monkeypatch: pytest.MonkeyPatch, kind: type[T]) -> list[T]:
    """All objects of a class that are made from now on."""
    made: list[T] = []
    begins: Any = kind.__init__

    def noted(self: T, *arguments: Any) -> None:
        begins(self, *arguments)
        made.append(self)

    monkeypatch.setattr(kind, "__init__", noted)
    return made


@pytest.mark.parametrize(("mode", "streams"), EACH_MODE)
def test_every_promise_holds_where_versions_come_as_differences(
    monkeypatch: pytest.MonkeyPatch, mode: str, streams: bool
) -> None:
    """Each follows from what is held, over breaks, restarts and versions that were missed."""
    made = instances(monkeypatch, Fragments)
    for seed in (0, 1):
        run = Simulation(a_scenario(mode, streams, seed, replies="int4z"), seed).run()
        assert run.counted() > 0
    assert sum(each.followed for each in made) > 0
    assert max(each.longest for each in made) > 1, "no worker has missed a version"


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", ["streaming", "carry", "async", "async-dylu"])
def test_every_promise_holds_where_replies_are_merged_on_arrival(mode: str, seed: int) -> None:
    scenario = a_scenario(mode, True, seed)
    config = replace(scenario.config, fragment_sync_delay="auto", fragment_max_delay=None)
    assert Simulation(replace(scenario, config=config), seed).run().counted() > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "saved", "streams"),
    [
        (mode, saved, (number + saved) % 2 == 0)
        for number, mode in enumerate(("streaming", "carry", "async"))
        for saved in (0, DURABLE, REWIND)
    ],
)
def test_each_counted_unit_is_in_the_parameters_once(mode: str, streams: bool, saved: int) -> None:
    scenario = a_scenario(mode, streams, seed=1, saved=saved)
    run = Simulation(replace(scenario, has_units=True), seed=1).run()
    assert len(counted(run)) > 10
    assert times_contained(run) == dict.fromkeys(counted(run), 1)


@pytest.mark.parametrize("fields", [{"mode": "async"}, {"num_fragments": 2}], ids=str)
def test_workers_follow_to_the_standby_of_a_hub_that_is_gone(fields: dict[str, Any]) -> None:
    config = a_config(
        3, save_dir="run", standby=True, lease=3.0, sync_every=8, recover_wait=5.0, **fields
    )
    run = Simulation(Scenario(config, workers=3, speeds=(1.0, 1.0), troubles=NO_TROUBLES), seed=1)
    for _ in range(3):
        run.newcomer()
    run.passes(30.0)
    before = run.referee.versions_made
    run.hub.dies()
    run.is_away(HUB, math.inf)
    run.passes(60.0)
    assert run.term == 1
    assert before > 5
    assert run.referee.versions_made > before + 5


# Where a worker's grant was lost, or a broker restarted, between a refusal and the next version.
REFUSING = {"streaming": (1, 2, 6, 8, 19, 27, 35)}


@pytest.mark.parametrize(("mode", "streams"), EACH_MODE)
def test_each_worker_keeps_exactly_what_was_left_out_of_what_counts(
    monkeypatch: pytest.MonkeyPatch, mode: str, streams: bool
) -> None:
    """Many pushes are refused behind their first chunks, which count all the same."""
    made = instances(monkeypatch, Residuals)
    monkeypatch.setitem(BUSY, "blunders", 0.1)
    for seed in REFUSING.get(mode, (1, 2)):
        scenario = replace(a_scenario(mode, streams, seed), wants=({"wire_dtype": "int4"},))
        Simulation(scenario, seed).run()
    if mode == "streaming":
        assert sum(each.settled_in_part for each in made) > 0


# These need rare interleavings: each seed once showed a deadlock between a worker that waited for a
# round and a round that waited for a worker.
STOOD_STILL = [("streaming", 19), ("streaming", 33), ("streaming", 39)]
STOOD_STILL += [("deterministic", 19), ("deterministic", 46), ("deterministic", 59)]


@pytest.mark.parametrize(("mode", "seed"), STOOD_STILL)
def test_runs_that_once_stood_still_get_on(mode: str, seed: int) -> None:
    assert Simulation(a_scenario(mode, True, seed), seed).run().referee.versions_made > 0


def with_restarts(scenario: Scenario) -> Scenario:
    config = replace(scenario.config, recover_wait=3.0)
    return replace(scenario, config=config, troubles=replace(scenario.troubles, restarts=0.06))


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", ["streaming", "carry", "async"])
def test_run_continues_from_versions_of_workers_after_a_restart(mode: str, seed: int) -> None:
    scenario = with_restarts(a_scenario(mode, seed % 2 == 0, seed, saved=0))
    assert Simulation(scenario, seed).run().referee.versions_made > 0


@pytest.mark.nightly
@pytest.mark.timeout(600)  # 43 s of a quiet core
@pytest.mark.parametrize("mode", ["streaming", "carry", "async"])
def test_five_hundred_workers_get_on(mode: str) -> None:
    own: dict[str, Any] = {"async": {"staging_slots": 16}, "carry": {"quorum": 200}}.get(mode, {})
    fields = {**MODES[mode], **own, "num_fragments": 2, "sync_every": 4}
    config = a_config(250, **fields, heartbeat_timeout=12.0)
    scenario = Scenario(
        config,
        workers=500,
        most=500,
        chunks=2,
        steps_per_s=1.0,
        speeds=(0.5, 2.0),
        goal=1,
        troubles=Troubles(10.0, kills=2.0, breaks=5.0, outages=1.0, leaves=0.5, joins=1.0),
        thoroughness=5000,
    )
    run = Simulation(scenario, seed=1).run()
    assert len(run.processes) > 500
    assert run.counted() > 1000


# Single things, each in a calm network.


def calm(workers: int, pieces: int = 2, **fields: Any) -> Scenario:
    """Without faults; all workers have the same speed and never force or blunder."""
    config = a_config(workers, num_fragments=pieces, sync_every=8, heartbeat_timeout=12.0, **fields)
    return Scenario(
        config, workers=0, speeds=(1.0, 1.0), timeouts=(600.0,), habits={}, troubles=NO_TROUBLES
    )


@pytest.mark.parametrize("mode", ["streaming", "deterministic", "carry", "drop"])
def test_joiner_three_times_slower_is_waited_for_or_deferred_and_stops_nobody(mode: str) -> None:
    quorum = {"quorum": 2} if mode in ("carry", "drop") else {}
    run = Simulation(calm(2, pieces=3, **MODES[mode], **quorum), seed=2)
    run.newcomer()
    run.newcomer()
    run.passes(20.0)
    made = run.referee.versions_made
    slow = run.newcomer(speed=1.3)
    run.passes(60.0)
    assert run.referee.versions_made > made + 20
    endings = [slow.training.endings.get(fragment, 0) for fragment in range(3)]
    assert min(endings) > 1, f"pushes of the slow worker that ended, by fragment: {endings}"


def test_worker_that_is_always_late_moves_on_in_every_fragment() -> None:
    run = Simulation(calm(2, late="drop", quorum=1, grace=0.2), seed=2)
    run.newcomer(speed=12.0)
    run.newcomer(speed=12.0)
    run.passes(20.0)
    slow = run.newcomer(speed=1.5)
    run.passes(60.0)
    behind = [
        run.referee.tensors.versions[fragment].counter
        - slow.training.fragments[fragment].version.counter
        for fragment in range(2)
    ]
    assert max(behind) < 15, f"versions that it is behind, by fragment: {behind}"


def test_dynamic_local_updates_bring_unequal_workers_to_one_pace() -> None:
    run = Simulation(calm(2, pieces=1, mode="async", dylu=True), seed=5)
    fast, slow = run.newcomer(speed=8.0), run.newcomer(speed=2.0)
    run.passes(60.0)
    assert slow.training.state is not None
    assert slow.training.state.schedule.sync_every == 2
    assert 0.8 < fast.training.endings[0] / slow.training.endings[0] < 1.25


@pytest.mark.slow
def test_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    scenario = a_scenario("streaming", True, 0)
    first, again, other = (Simulation(scenario, seed).run() for seed in (11, 11, 12))
    assert first.fingerprint == again.fingerprint
    assert first.fingerprint != other.fingerprint


# Sabotage: the referee finds broken brokers.


Sabotage = tuple[object, str, Any]  # the object, its attribute, and the new value


def nothing(*_: object) -> Iterator[Effect]:
    return iter(())


MERGES_TWICE: Sabotage = (collect, "forget", lambda *_: None)


def settle_half(submission: Submission, now: float) -> None:
    submission.whole_at = now


def step_by_promised_weight(
    state: RunState, round_: StreamingRound, indexes: Iterable[int]
) -> Iterator[Effect]:
    count = state.versions[round_.fragment].gradients - 1
    weight = sum(c.weight for c in round_.contributions.values())
    for index in indexes:
        yield Step(round_.fragment, index, weight, count)


def stands_nowhere(state: RunState, _member: Member, push: Push) -> Bitmap:
    """The broker ignores its ledger. The referee does not."""
    return Bitmap(push.chunks)


STUCK = "no version was released|has a push in flight|stands still|no end within"


complete_in_earnest = sequence._complete


def complete_before_it_is_saved(state: RunState, ended: Update) -> Iterator[Effect]:
    yield from complete_in_earnest(state, ended)
    made, state.unreleased = state.unreleased, None
    if made is not None:
        yield from sequence._release(state, made)


def without_the_version_that_waits(state: RunState, number: int) -> RunRecord:
    return run_record(replace(state, unreleased=None), number)


def the_oldest(
    state: RunState, members: Iterable[Member]
) -> dict[int, tuple[Member, VersionId | None]]:
    holders = [member for member in members if all(member.versions[:1])]
    oldest = min(holders, key=lambda m: sum(v.counter for v in m.versions if v), default=None)
    pieces = [f for f in state.model.all_fragments if f not in state.recovery.restored]
    held = dict(enumerate(oldest.versions)) if oldest else {}
    return {f: (oldest, held[f]) for f in pieces if f in held} if oldest else {}


def wait_for_nobody(_: RunState) -> tuple[str, float]:
    return "", 0.0


def loses(name: str, value: Any) -> Sabotage:
    """A broker that loads everything of a checkpoint but one thing."""
    load_into = resume.load_into

    def lose(*of: Any) -> Resumption:
        whole = load_into(*of)
        record = whole.record
        poor = {f: replace(each, **{name: value}) for f, each in record.fragments.items()}
        return replace(whole, record=replace(record, fragments=poor))

    return resume, "load_into", lose


def to_break(mode: str, seed: int, saving_as: int | None) -> Scenario:
    """With a way of saving, brokers that die often, slow seeding, and long hangs."""
    scenario = a_scenario(mode, seed % 2 == 0, seed, saving_as)
    if saving_as is None:
        return scenario
    often = {"restarts": 0.12, "kills": 0.2, "joins": 0.2, "hangs": 0.1, "hang_s": 30.0}
    troubles = replace(scenario.troubles, **often)
    return replace(scenario, chunks=9, weather=WEATHERS[1], troubles=troubles)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("mode", "saving_as", "sabotage", "complaint"),
    [
        ("carry", None, MERGES_TWICE, "is counted twice"),
        ("streaming", None, (RunState, "weight_of", lambda *_: 1.0), "weighs 1.0 instead of"),
        ("streaming", None, (sequence, "leave", nothing), STUCK),
        ("streaming", None, (Member, "take_deferred", lambda *_: None), STUCK),
        ("streaming", None, (Ledger, "with_push", lambda ledger, *_: ledger), "lacks"),
        ("async", None, (asynchronous, "_may_send", lambda *_: True), "are kept in"),
        (
            "async-stale",
            None,
            (asynchronous, "_too_old", lambda *_: None),
            "versions old and merged",
        ),
        (
            "deterministic",
            None,
            (Submission, "_settle", settle_half),
            "without its chunk|half a push|but [0-9] workers",
        ),
        (
            "streaming",
            None,
            (RunState, "standing", stands_nowhere),
            "is counted twice|more than once",
        ),
        ("streaming", None, (streaming, "_step", step_by_promised_weight), "is divided by"),
        # Of brokers that come back.
        (
            "streaming",
            DURABLE,
            (sequence, "_complete", complete_before_it_is_saved),
            "is told of and is not on the disk",
        ),
        (
            "async",
            DURABLE,
            (checkpoints, "run_record", without_the_version_that_waits),
            "is told of and is not on the disk|has other chunks than it had|and .* is adopted",
        ),
        ("streaming", ADOPT, (seeding, "_sources", lambda *_: {}), f"{STUCK}|a member has version"),
        ("async", 0, (seeding, "_sources", the_oldest), "a member has version|stands still"),
        ("carry", ADOPT, (seeding, "_newer_holders", wait_for_nobody), "it did not wait for"),
        ("streaming", REWIND, loses("ledger", Ledger()), "has another ledger"),
        ("async", DURABLE, loses("gradients", 0), "is told 0 gradients"),
        ("streaming", ADOPT, (sequence, "stall", nothing), "and is waited for"),
    ],
)
def test_broken_broker_is_found_out(
    mode: str,
    saving_as: int | None,
    sabotage: Sabotage,
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The referee does not rely on them.
    monkeypatch.setattr(Core, "check_invariants", lambda _: None)
    monkeypatch.setattr(*sabotage)
    runs = (Simulation(to_break(mode, seed, saving_as), seed) for seed in range(12))
    with pytest.raises(Violation, match=complaint):
        all(run.run() for run in runs)


def test_failure_names_the_seed_and_tells_the_story(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MERGES_TWICE)
    with pytest.raises(Violation, match=r"(?s)seed 7.*deterministic=True.*freezes"):
        Simulation(a_scenario("deterministic", False, 7), seed=7).run()
