"""Connections cut at the boundaries of messages and within them: no bit changes.

Workers train through a proxy that knows where each message begins and ends (`proxy.MessageProxy`). For
every kind of message, each way, there is a run in which it is lost, one in which it arrives and the
connection breaks right after it, and chunks are cut in the middle too; in all modes. Whatever breaks,
every worker's parameters after every step are those of a calm run, bit for bit, so each pseudo-gradient
was counted once. That only missing chunks are sent again is tested in `worker/session/test_transfers`.
"""

import logging
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from diloco_broker import Broker
from diloco_worker import DiLoCoWorker
from kit.proxy import Cut, MessageProxy
from kit.reference import Outcome, state_of
from kit.whole_run import Event, assert_same, make_config, run, trainees

UP, DOWN = True, False
# 83 parameters are eleven chunks: a push needs more than its first credit, which is 6.
CHUNK_ELEMENTS, CHUNKS = 8, 11
# A break here is not a reconnection: the worker has not been welcomed before, or is leaving. A notice
# may follow a welcome that the worker has not read yet.
UNNOTICED = {"greeting", "ready", "join", "welcome", "notice", "leave"}
# Seconds for which a worker stays expected after its connection broke: no round closes without it.
GRACE_S = 30.0
# Cuts end a wait at one boundary again and again; it goes on as long as there is a broker.
RETRIES = 1000
# A kind of run: how many workers, and the options of its broker. A push is due every two steps.
IN_FRAGMENTS = {"sync_every": 4, "num_fragments": 2, "fragment_sync_delay": 1}
MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "streaming mean": (2, {"sync_every": 2}),
    "deterministic": (2, {"sync_every": 2, "deterministic": True}),
    "asynchronous": (1, {"sync_every": 2, "mode": "async"}),
    "fragments": (2, {**IN_FRAGMENTS, "fragment_update_alpha": 0.25}),
    "fragments in order": (2, {**IN_FRAGMENTS, "fragment_merge": "rebase", "deterministic": True}),
}
STEPS_A_PUSH = 2
# Cuts come one after the other, each on the connections that were opened after the one before. How much
# of the message passes: nothing, or all.
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
# Messages at which a connection breaks while training goes on.
WHERE: dict[str, list[tuple[bool, str]]] = {
    "push": [(UP, "push"), (DOWN, "grant"), (UP, "commit")],
    "pull": [(UP, "pull"), (UP, "credit"), (UP, "heartbeat"), (DOWN, "notice")],
    "chunks": [(UP, "chunk"), (DOWN, "ack"), (DOWN, "chunk"), (DOWN, "released")],
}
EVERY_KIND = [each for kinds in WHERE.values() for each in kinds]
# The first parameters come from a worker; this breaks its upload.
SEEDING = [
    Cut(DOWN, "notice", passed=0),
    Cut(DOWN, "notice"),
    Cut(UP, "push", passed=0),
    Cut(DOWN, "grant"),
    Cut(UP, "chunk", skip=3, passed=-1),
    Cut(DOWN, "ack", skip=1, passed=0),
]


@dataclass
class Run:
    """A run through the proxy, and the hooks of its workers."""

    outcome: Outcome
    hooks: list[DiLoCoWorker]


def through_the_proxy(
    name: str,
    cuts: Iterable[Cut],
    steps: int,
    *,
    provided: bool = True,
    before: Event | None = None,
    **options: Any,
) -> Run:
    """A run of which all workers come through the proxy.

    The broker has the first parameters if they are `provided`; `before` is called before each step.
    """
    workers, usual = MODES[name]
    made = trainees(workers)
    initial = state_of(made[0].model) if provided else None
    usual = {"chunk_elements": CHUNK_ELEMENTS, "disconnect_grace": GRACE_S, **usual}
    config = make_config(workers=workers, **usual | options)
    hooks: list[DiLoCoWorker] = []

    def note(hook: DiLoCoWorker, worker: int, step: int) -> None:
        hooks.append(hook)

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
    return Run(outcome, hooks)


@cache
def calm(name: str, steps: int) -> Run:
    return through_the_proxy(name, [], steps)


def change_no_bit(name: str, cuts: Sequence[Cut], steps: int, **options: Any) -> None:
    """A run with these cuts is the calm one."""
    got = through_the_proxy(name, cuts, steps, **options)
    workers, rounds = MODES[name][0], steps // STEPS_A_PUSH
    assert_same(got.outcome, calm(name, steps).outcome, exact=True)
    metrics = [hook.sync_metrics for hook in got.hooks]
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


@pytest.mark.parametrize(("kinds", "name"), [("push", "fragments in order"), ("pull", "fragments")])
def test_break_and_reply_within_one_long_step_change_no_bit(kinds: str, name: str) -> None:
    """Between sending a fragment and merging it the worker reconnects and receives the reply."""

    def until_it_is_here(hook: DiLoCoWorker, worker: int, step: int) -> None:
        link = hook._link
        if step and step % STEPS_A_PUSH == 0:
            assert link is not None
            assert link.wait_for(lambda: bool(link.arrivals), 20)

    cuts = [Cut(*kind, passed=passed) for kind in WHERE[kinds] for passed in (LOST, ARRIVED)]
    change_no_bit(name, cuts, 2 * STEPS_A_PUSH * len(cuts), before=until_it_is_here)


@pytest.mark.parametrize("name", ["streaming mean", "fragments"])
def test_break_in_the_first_upload_of_parameters_changes_no_bit(name: str) -> None:
    change_no_bit(name, SEEDING, 6, provided=False)


# The chunks of a push in two modes; each of the other messages in one of them, the rest at night.
EVERY_BREAK = [
    pytest.param(
        *(up, kind, name),
        marks=pytest.mark.slow
        if (row - column) % len(MODES) == 0 or (up, kind, column) == (UP, "chunk", 0)
        else pytest.mark.nightly,
    )
    for row, (up, kind) in enumerate(EVERY_KIND)
    for column, name in enumerate(MODES)
]


@pytest.mark.parametrize(("up", "kind", "name"), EVERY_BREAK)
def test_break_at_every_message_changes_no_bit(up: bool, kind: str, name: str) -> None:
    place = random.Random(f"{name} {up} {kind}")
    deep, in_a_push = (CHUNKS, 5) if kind == "chunk" else (4, 1)
    cuts = [
        Cut(up, kind, skip, passed)
        for skip in range(deep)
        for passed in (LOST, ARRIVED, place.randrange(1, 90))
    ]
    change_no_bit(name, cuts, STEPS_A_PUSH * sum(2 + cut.skip // in_a_push for cut in cuts))
