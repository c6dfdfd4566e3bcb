"""Connections cut at the boundaries of messages and within them: no bit changes, nothing is sent twice.

Workers train through a proxy that knows where each message begins and ends (`proxy.MessageProxy`). For
every kind of message, each way, there is a run in which it is lost, one in which it arrives and the
connection breaks right behind it, and chunks are cut in the middle too; in all modes. Whatever breaks,
every worker's parameters after every step are those of a calm run, bit for bit. What has passed is
audited: `audit` for what was counted, `resent` for what was sent in vain.
"""

from __future__ import annotations

import logging
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from diloco_broker import Broker
from diloco_worker import DiLoCoWorker
from kit.proxy import Cut, MessageProxy, Seen
from kit.reference import Outcome, Trainee, state_of
from kit.whole_run import Event, adamw, assert_same, make_config, run, trainee, trainees

UP, DOWN = True, False
# 83 parameters are eleven chunks: a push needs more than its first credit, which is 6.
CHUNK_ELEMENTS, CHUNKS = 8, 11
# A chunk message ends with a frame of two bytes and 8 elements in fp32.
BUFFER_FRAME = 2 + 4 * CHUNK_ELEMENTS
# Breaking here is no reconnection: the worker has not been welcomed before, or goes for good. A notice
# may come right behind a welcome that the worker has not read yet.
UNNOTICED = {"greeting", "ready", "join", "welcome", "notice", "leave"}
# As long as a worker may be back it stays expected: no round closes without it.
GRACE_S = 30.0
# Cuts end a wait at one boundary again and again; it goes on as long as there is a broker.
RETRIES = 1000
# A ledger remembers so many pushes of a worker.
REMEMBERED = 8


# A kind of run: how many workers, and the options of its broker. A push is due every two steps.
IN_FRAGMENTS = {"sync_every": 4, "num_fragments": 2, "fragment_sync_delay": 1}
MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "streaming mean": (2, {"sync_every": 2}),
    "deterministic": (2, {"sync_every": 2, "deterministic": True}),
    "asynchronous": (1, {"sync_every": 2, "mode": "async"}),
    "fragments": (2, {**IN_FRAGMENTS, "fragment_update_alpha": 0.25}),
    "fragments in order": (
        2,
        {**IN_FRAGMENTS, "fragment_merge": "rebase", "deterministic": True},
    ),
}
STEPS_A_PUSH = 2
# Cuts come one after the other, each on the connections that were opened after the one before. Of each
# message on each way, those before it on its connection, and how much of it passes: nothing, or all.
LOST, ARRIVED = 0, None
BEGINNING = [
    Cut(UP, "greeting", passed=0),
    Cut(UP, "greeting", passed=10),
    Cut(DOWN, "greeting", skip=1, passed=-1),
    Cut(DOWN, "greeting"),
    Cut(UP, "ready", passed=0),
    Cut(UP, "ready", skip=1),
    Cut(DOWN, "ready", passed=0),
    Cut(DOWN, "ready", skip=1),
    Cut(UP, "join", passed=0),
    Cut(UP, "join", passed=-1),
    Cut(UP, "join"),
    Cut(DOWN, "welcome", passed=0),
    Cut(DOWN, "welcome"),
]
IN_A_CHUNK = [(0, LOST), (0, ARRIVED), (9, LOST), (9, -BUFFER_FRAME), (9, ARRIVED)]
ALL = [(0, LOST), (0, ARRIVED), (1, LOST), (1, ARRIVED)]  # a push takes two acknowledgements
PLACES: dict[str, dict[tuple[bool, str], list[tuple[int, int | None]]]] = {
    "push": {
        (UP, "push"): [(0, LOST), (0, ARRIVED), (1, ARRIVED)],
        (DOWN, "grant"): [(0, LOST), (0, ARRIVED), (1, ARRIVED)],
        (UP, "commit"): [(0, LOST), (0, ARRIVED), (1, ARRIVED)],
    },
    "chunk of a push": {(UP, "chunk"): IN_A_CHUNK, (DOWN, "ack"): ALL},
    "pull": {
        (UP, "pull"): [(0, LOST), (0, ARRIVED), (1, LOST)],
        (UP, "credit"): [(0, LOST), (0, ARRIVED), (1, LOST)],
        (UP, "heartbeat"): [(0, LOST)],
        (DOWN, "notice"): [(0, LOST)],
    },
    "chunk of a pull": {
        (DOWN, "chunk"): IN_A_CHUNK,
        (DOWN, "released"): ALL,
        (UP, "leave"): [(0, LOST)],
    },
}
EVERY_KIND = [way for places in PLACES.values() for way in places if way[1] != "leave"]
# The first parameters come from a worker; this breaks its upload.
DONATION = [
    Cut(DOWN, "notice", passed=0),
    Cut(DOWN, "notice"),
    Cut(UP, "push", passed=0),
    Cut(DOWN, "grant"),
    Cut(UP, "chunk", skip=3, passed=-1),
    Cut(DOWN, "ack", skip=1, passed=0),
]


@dataclass
class Run:
    """What became of a run through the proxy."""

    outcome: Outcome
    seen: list[Seen]
    hooks: dict[int, DiLoCoWorker]


def through_the_proxy(
    name: str,
    cuts: Iterable[Cut],
    steps: int,
    make: Callable[[int], list[Trainee]] = trainees,
    *,
    provided: bool = True,
    before: Event | None = None,
    **options: Any,
) -> Run:
    """A run of which all workers come through the proxy, and `make` from their number what they train.

    The broker has the first parameters if they are `provided`; `before` is called before each step.
    """
    workers, usual = MODES[name]
    made = make(workers)
    initial = state_of(made[0].model) if provided else None
    usual = {"chunk_elements": CHUNK_ELEMENTS, "disconnect_grace": GRACE_S, **usual}
    config = make_config(workers=workers, **usual | options)
    hooks: dict[int, DiLoCoWorker] = {}

    def note(hook: DiLoCoWorker, worker: int, step: int) -> None:
        hooks[worker] = hook

    with Broker(config, initial) as broker, MessageProxy(broker.address, cuts) as proxy:
        outcome = run(
            broker,
            made,
            steps,
            server=proxy.address,
            before=before,
            done=note,
            options={"max_sync_retries": RETRIES},
        )
        assert proxy.is_done.wait(10), f"the run ended before {proxy.cuts[0]}"
    return Run(outcome, proxy.seen, hooks)


@cache
def calm(name: str, steps: int) -> Run:
    return through_the_proxy(name, [], steps)


def worker_of_connection(seen: Iterable[Seen]) -> dict[int, str]:
    """For each control connection who has joined on it."""
    return {each.connection: each.header["worker_id"] for each in seen if each.kind == "join"}


def frozen(seen: Iterable[Seen]) -> dict[tuple[str, int], list[int]]:
    """By worker and fragment the ids of its pseudo-gradients, in order."""
    seen = list(seen)
    workers = worker_of_connection(seen)
    pushes: dict[tuple[str, int], list[int]] = defaultdict(list)
    for each in seen:
        if each.kind == "push" and each.header.get("purpose", "gradient") == "gradient":
            mine = pushes[workers[each.connection], each.header["fragment"]]
            if each.header["push_id"] not in mine:
                mine.append(each.header["push_id"])
    return pushes


def audit(seen: Sequence[Seen], workers: int, rounds: int) -> None:
    """Version n of a fragment has the first n pseudo-gradients of each worker, whole, and no others.

    `rounds` are those of all fragments.
    """
    pushes = frozen(seen)
    assert len({worker for worker, _ in pushes}) == workers
    versions: dict[tuple[int, int], Mapping[str, Any]] = {}
    for each in seen:
        if each.kind == "released":
            version = each.header["version"]
            known = versions.setdefault((each.header["fragment"], version["counter"]), each.header)
            assert known["version"]["tag"] == version["tag"], "two versions with one counter"
    for (fragment, counter), header in versions.items():
        counted = {
            worker: [push["push_id"] for push in listed]
            for worker, listed in header["ledger"]["pushes"].items()
        }
        wanted = {
            worker: ids[max(0, counter - REMEMBERED) : counter]
            for (worker, of), ids in pushes.items()
            if of == fragment and counter
        }
        assert counted == wanted, f"version {counter} of fragment {fragment}"
        partly = [p for of in header["ledger"]["pushes"].values() for p in of if p.get("chunks")]
        assert not partly
        assert header["averaged"] == (workers if counter else 0)
    newest: Counter[int] = Counter()
    for fragment, counter in versions:
        newest[fragment] = max(newest[fragment], counter)
    assert newest.total() == rounds
    assert all(len(ids) == newest[fragment] for (_, fragment), ids in pushes.items())


def resent(seen: Sequence[Seen]) -> list[str]:
    """Chunks sent again although their sender could know better.

    Up: the broker had acknowledged them. Down: their reader had given their credit back; a credit names
    no chunks, but they come in the order of those on the bulk connection.
    """
    workers = worker_of_connection(seen)
    sessions = {s.header["session"]: workers[s.connection] for s in seen if s.kind == "welcome"}
    fragments = {each.header["fragment"] for each in seen if each.kind == "released"}
    acknowledged: set[tuple[int, int]] = set()
    bulk: dict[bytes, int] = {}  # connection by session
    reader: dict[int, str] = {}  # worker by bulk connection
    unpaid: dict[int, deque[tuple[int, int]]] = defaultdict(deque)  # by bulk connection
    paid: dict[str, set[tuple[int, int]]] = defaultdict(set)  # by worker
    found = []
    for each in seen:
        header = each.header
        match each.kind, each.up:
            case "chunk", True:
                if (header["push_id"], header["index"]) in acknowledged:
                    found.append(f"chunk {header['index']} of push {header['push_id']:x}")
            case "ack", _:
                acknowledged |= {(header["push_id"], index) for index in header["chunks"]}
            case "credit", _ if header["session"] not in bulk:
                bulk[header["session"]] = each.connection
                reader[each.connection] = sessions[header["session"]]
            case "credit", _:
                connection = bulk[header["session"]]
                for _ in range(header["chunks"]):
                    paid[reader[connection]].add(unpaid[connection].popleft())
            case "chunk", False:
                chunk = header["version"]["tag"], header["index"]
                # Of a model of which some fragments have never come, all are asked for anew.
                first = header["version"]["counter"] == 0 and len(fragments) > 1
                if not first and chunk in paid[reader[each.connection]]:
                    found.append(f"chunk {header['index']} of version {chunk[0]:x}")
                unpaid[each.connection].append(chunk)
    return found


def change_no_bit(name: str, cuts: Sequence[Cut], steps: int, **options: Any) -> None:
    """A run with these cuts is the calm one."""
    check(name, through_the_proxy(name, cuts, steps, **options), calm(name, steps), cuts, steps)


def check(name: str, got: Run, wanted: Run, cuts: Sequence[Cut], steps: int) -> None:
    """What every run must keep to, whatever broke."""
    workers, rounds = MODES[name][0], steps // STEPS_A_PUSH
    assert_same(got.outcome, wanted.outcome, exact=True)
    audit(got.seen, workers, rounds)
    assert resent(got.seen) == []
    metrics = [hook.sync_metrics for hook in got.hooks.values()]
    assert [each.pushes for each in metrics] == [rounds] * workers
    breaks = sum(cut.kind not in UNNOTICED for cut in cuts)
    assert sum(each.reconnections for each in metrics) >= breaks


@pytest.fixture(autouse=True)
def _no_errors(caplog: pytest.LogCaptureFixture) -> Any:
    """What the hook catches so that training goes on, it logs as an error."""
    yield
    errors = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
    assert not errors


def test_break_before_there_is_a_session_is_no_news(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco_worker.session.connection.LONGEST_BACKOFF_S", 0.1)
    monkeypatch.setattr("diloco_worker.session.connection.RETRY_S", 0.1)
    change_no_bit("streaming mean", BEGINNING, 4)


def cuts_at(place: str) -> list[Cut]:
    return [Cut(*way, *where) for way, places in PLACES[place].items() for where in places]


@pytest.mark.parametrize(("place", "name"), [("push", "fragments in order"), ("pull", "fragments")])
def test_break_and_reply_within_one_long_step_change_no_bit(place: str, name: str) -> None:
    """Between sending a fragment and merging it the worker is away, is back, and has the reply."""

    def until_it_is_here(hook: DiLoCoWorker, worker: int, step: int) -> None:
        link = hook._link
        if step and step % STEPS_A_PUSH == 0:
            assert link is not None
            assert link.wait_for(lambda: bool(link.arrivals), 20)

    change_no_bit(name, cuts_at(place), 24, before=until_it_is_here)


@pytest.mark.parametrize("name", ["streaming mean", "fragments"])
def test_break_in_the_first_upload_of_parameters_changes_no_bit(name: str) -> None:
    change_no_bit(name, DONATION, 6, provided=False)


def wide(workers: int) -> list[Trainee]:
    """Seven chunks of 2500 elements, 10 kB: more than ZeroMQ reads at once."""
    made = []
    for worker in range(workers):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 2000), nn.Tanh(), nn.Linear(2000, 3))
        made.append(trainee(model, adamw(model), worker))
    return made


WIDE_STEPS = 32


@pytest.mark.slow
@pytest.mark.parametrize(("up", "name"), [(UP, "streaming mean"), (DOWN, "fragments in order")])
def test_break_at_any_byte_of_a_chunk_changes_no_bit(up: bool, name: str) -> None:
    place = random.Random(f"{name} {up}")
    cuts = [
        Cut(up, "chunk", place.randrange(4), passed=place.randrange(1, 10_000)) for _ in range(8)
    ]
    got, wanted = (
        through_the_proxy(name, each, WIDE_STEPS, wide, chunk_elements=2500) for each in (cuts, [])
    )
    check(name, got, wanted, cuts, WIDE_STEPS)


# A push and its chunks in each mode; all other messages in two of them, the rest at night.
EVERY_BREAK = [
    pytest.param(
        up,
        kind,
        name,
        marks=pytest.mark.slow
        if kind in ("push", "chunk") or name in ("streaming mean", "fragments in order")
        else pytest.mark.nightly,
    )
    for up, kind in EVERY_KIND
    for name in MODES
]


@pytest.mark.parametrize(("up", "kind", "name"), EVERY_BREAK)
def test_break_at_every_message_changes_no_bit(up: bool, kind: str, name: str) -> None:
    place = random.Random(f"{name} {up} {kind}")
    deep, in_a_push = (CHUNKS, 5) if kind == "chunk" else (4, 1)
    cuts = [
        Cut(up, kind, skip, passed)
        for skip in range(deep)
        for passed in (0, None, place.randrange(1, 90))
    ]
    change_no_bit(name, cuts, STEPS_A_PUSH * sum(2 + cut.skip // in_a_push for cut in cuts))
