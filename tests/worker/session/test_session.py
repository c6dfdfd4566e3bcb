"""The worker's state machine, with a simulated clock and no socket."""

from dataclasses import replace
from typing import Any

import pytest

from diloco_protocol import RunConfig, VersionId
from diloco_protocol.messages import (
    Ack,
    Control,
    Credit,
    Error,
    Grant,
    Heartbeat,
    Join,
    Leave,
    Message,
    Notice,
    Pull,
    Push,
    Result,
    Standing,
)
from diloco_worker.session.compatibility import LEAST_HEARTBEAT_S, Terms, cut, heartbeat_interval
from diloco_worker.session.connection import LONGEST_BACKOFF_S, REFUSED_RETRY_S, Phase
from diloco_worker.session.downloads import DOWNLOAD_WINDOW
from diloco_worker.session.effects import (
    Answered,
    Beat,
    Close,
    Deliver,
    Effect,
    JoinRefused,
    Open,
    Say,
    Send,
    Told,
)
from diloco_worker.session.events import (
    Ask,
    Connected,
    Depart,
    Disconnected,
    Event,
    Observe,
    Offer,
    Received,
    RequestVersion,
    Start,
    Tick,
    Withdraw,
)
from diloco_worker.session.session import Session
from kit.core_harness import a_manifest
from kit.session_harness import (
    CONFIG,
    FROZEN,
    LAYERS,
    MANIFEST,
    STREAMING,
    Desk,
    desk,
    gradient,
    version,
    whole,
)


def test_join_is_sent_on_the_control_connection_and_credit_follows_the_welcome(fresh: Desk) -> None:
    assert fresh.effects == [Open()]
    fresh.passes(60)
    assert not fresh.sent(Join)
    (join,) = fresh.connects().sent(Join)
    assert (join.worker_id, join.manifest, join.session, join.run) == ("me", MANIFEST, None, None)
    sends = fresh.is_welcomed(version(0)).all(Send)
    assert sends[0] == Send(Credit(DOWNLOAD_WINDOW, b"\1" * 16), bulk=True), "before any pull"
    assert [(p.fragment, p.after) for p in fresh.sent(Pull)] == [(0, -1), (FROZEN, -1)]
    assert fresh.session.connection.is_joined


@pytest.mark.parametrize("code", ["id_taken", "standby", "stopping"])
def test_join_is_retried_soon_when_the_broker_is_not_ready(fresh: Desk, code: str) -> None:
    error = Error(code, "Soon.", retry=code != "stopping")
    fresh.connects().hears(error)
    assert fresh.effects == [Say(error.text, trouble=True)]
    fresh.passes(LONGEST_BACKOFF_S)
    assert len(fresh.sent(Join)) == 1


def test_refusal_at_joining_is_final(fresh: Desk) -> None:
    fresh.connects().hears(Error("model_differs", "It lacks head."))
    assert fresh.effects == [JoinRefused("model_differs", "It lacks head.", final=True)]
    fresh.passes(10 * REFUSED_RETRY_S)
    assert not fresh.effects
    assert fresh.session.wakes_at() is None


def test_refusal_during_a_run_is_retried_later(ready: Desk) -> None:
    ready.breaks().hears(Error("id_taken", "Another one is alive."))
    assert ready.effects == [JoinRefused("id_taken", "Another one is alive.", final=False)]
    ready.passes(REFUSED_RETRY_S / 2)
    assert not ready.sent(Join)
    ready.passes(REFUSED_RETRY_S / 2)
    assert ready.sent(Join)


def test_reconnects_back_off(fresh: Desk) -> None:
    waits = []
    for _ in range(10):
        fresh.connects().happens(Disconnected("It broke."))
        opens_at = fresh.session.wakes_at()
        assert opens_at is not None
        waits.append(opens_at - fresh.now)
        fresh.passes(waits[-1])
        assert fresh.all(Open)
    assert waits == sorted(waits)
    assert waits[0] < 0.1
    assert waits[-1] == pytest.approx(LONGEST_BACKOFF_S)


UNSOUND: list[tuple[str, Any]] = [
    ("chunk_elements", 0),
    ("chunk_elements", 1),  # too small to track those of a large model
    ("chunk_elements", 2**40),
    ("fragment_update_alpha", float("nan")),
    ("fragment_update_alpha", -3.0),
    ("wire_dtype", "fp4"),
    ("reply_dtype", ""),
    ("weight_by", "__class__"),
]


@pytest.mark.parametrize(
    ("interval", "config", "words"),
    [
        (0.0, CONFIG, "heartbeat_interval 0"),
        (30.0, CONFIG, "heartbeat_interval is 30 s"),
        (None, RunConfig("gossip", 5), "mode 'gossip'"),
        (None, RunConfig("sync", 5, fragment_merge="sum"), "merges by 'sum'"),
        (None, RunConfig("sync", 3, num_fragments=4), "sync_every is 3 and the run has 4"),
        (None, RunConfig("sync", 5, num_fragments=2), "0 numbers for 1 tensors"),
        *((None, replace(CONFIG, **{name: value}), f"has {name}") for name, value in UNSOUND),
    ],
)
def test_incompatible_run_is_refused(interval: float | None, config: RunConfig, words: str) -> None:
    made = desk(interval, a_manifest(1_000_000)).connects().is_welcomed(version(0), config=config)
    (refusal,) = made.all(JoinRefused)
    assert words in refusal.text
    assert refusal.final
    assert made.sent(Leave), "else the broker would wait for this worker"


@pytest.mark.parametrize(
    ("interval", "config"),
    [(29.0, CONFIG), (None, RunConfig("async", 5)), (None, RunConfig("async", 5, dylu=True))],
)
def test_run_is_rejoined_with_another_h(interval: float | None, config: RunConfig) -> None:
    made = desk(interval).connects().is_welcomed(version(0), config=config)
    later = replace(config, sync_every=9, wire_dtype="fp32")
    for told in (config, later):
        assert made.session.connection.is_joined
        assert made.session.config == told
        made.breaks().is_welcomed(version(0), config=later)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("chunk_elements", 20),
        ("mode", "async"),
        ("num_fragments", 2),
        ("fragment_sync_delay", 1),
        ("fragment_update_alpha", 0.5),
        ("fragment_merge", "rebase"),
        ("fragment_max_delay", 3),
        ("fragment_delay_auto", True),
    ],
)
def test_rejoining_is_refused_where_terms_changed(ready: Desk, name: str, value: Any) -> None:
    ready.breaks().is_welcomed(version(0), config=replace(CONFIG, **{name: value}))
    (refusal,) = ready.all(JoinRefused)
    in_words = {"fragment_delay_auto": "fragment_sync_delay auto"}
    assert in_words.get(name, f"{name} {value}") in refusal.text
    assert not refusal.final


def streaming() -> Desk:
    """A worker that has joined a run with three fragments and holds version 0 of each."""
    made = desk(manifest=LAYERS).connects()
    made.is_welcomed(*[version(0)] * 3, config=STREAMING, plan=(2, 0, 1))
    for fragment in range(3):
        made.receives(version(0), fragment=fragment, chunks=1)
    return made


def test_model_is_cut_by_the_welcomed_plan_and_another_plan_is_refused() -> None:
    made = streaming()
    assert made.session.layout is not None
    parts = made.session.layout.fragments
    assert [part.places[0].entry.name for part in parts] == ["b", "c", "a"]
    made.breaks().is_welcomed(*[version(0)] * 3, config=STREAMING, plan=(0, 1, 2))
    (refusal,) = made.all(JoinRefused)
    assert "another plan" in refusal.text
    assert not refusal.final


def test_pushes_of_all_fragments_are_offered_again_oldest_first() -> None:
    made = streaming()
    flights = [Push(b"", 70 + each, each, 1, "bf16", base=version(0)) for each in (2, 0, 1)]
    made.happens(*map(Offer, flights))
    (join,) = made.breaks().sent(Join)
    assert join.versions[:3] == (version(0),) * 3
    made.is_welcomed(*[version(0)] * 3, config=STREAMING, plan=(2, 0, 1))
    assert [replace(push, session=b"") for push in made.sent(Push)] == flights
    made.receives(version(1), whole(70), fragment=0, chunks=1)
    assert [deliver.counted for deliver in made.all(Deliver)] == [70]
    made.receives(version(1), whole(72), fragment=2, chunks=1)
    assert [deliver.counted for deliver in made.all(Deliver)] == [72]


def test_training_is_notified_of_rounds_as_the_broker_names_them() -> None:
    made = streaming()
    made.happens(Offer(Push(b"", 70, 0, 1, "bf16", base=version(0))))
    said = [
        Grant(70, 0, Standing.WAIT, round=3),
        Grant(70, 0, Standing.NEW, credit=1, round=3),
        Notice("deferred", "Too late.", fragment=0, round=6),
    ]
    long_over = Grant(99, 0, Standing.NEW, credit=1, round=8)
    made.hears(*said, long_over)
    assert [told.message for told in made.all(Told)] == said


def test_heartbeat_is_sent_at_a_third_of_what_the_broker_tolerates(ready: Desk) -> None:
    ready.hears(Notice("alive"))
    ready.passes(9.9)
    assert not ready.all(Beat)
    ready.passes(0.2)
    assert ready.all(Beat) == [Beat(b"\1" * 16, uploading=False)]


PACED = Notice("alive", sync_every=7)
OVER, RESTART = (Notice(what, "SIGTERM.") for what in ("shutdown", "restarting"))


@pytest.mark.parametrize(
    ("notices", "effects"),
    [
        ([Notice("ping")], [Beat(b"\1" * 16, uploading=False)]),
        ([Notice("alive"), PACED], [Told(PACED)]),
        ([OVER], [Told(OVER)]),
        ([RESTART], [Told(RESTART)]),
        ([Heartbeat(b"", 1)], [Say("The broker sent a heartbeat, which only workers send.", True)]),
    ],
)
def test_notice_is_handled_soon(ready: Desk, notices: list[Message], effects: list[Effect]) -> None:
    ready.hears(*notices)
    assert ready.effects == effects


@pytest.mark.parametrize("what", ["stop_all", "over"])
@pytest.mark.parametrize("is_counted", [True, False], ids=["counted", "connection breaks"])
def test_stop_is_passed_on_after_the_last_push(ready: Desk, what: str, is_counted: bool) -> None:
    asked = Notice(what, "An operator asks each worker to stop.", round=9)
    ready.holds(version(0))
    ready.happens(Offer(gradient()))
    ready.hears(asked)
    assert not ready.all(Told)
    if is_counted:
        ready.receives(version(1), whole(77))
    else:
        ready.happens(Disconnected("gone"))
    assert ready.all(Told) == [Told(replace(asked, what="shutdown"))]
    ready.hears(asked)
    assert bool(ready.all(Told)) == is_counted, "nothing is in flight"


def test_save_request_is_passed_on_at_once(ready: Desk) -> None:
    asked = Notice("save_all", "An operator asks each worker to save.", round=9)
    ready.happens(Offer(gradient()))
    ready.hears(asked)
    assert ready.all(Told) == [Told(asked)]


def test_heartbeats_can_be_turned_off() -> None:
    made = desk(heartbeat_interval=0.0).connects()
    made.is_welcomed(version(0), config=RunConfig("sync", 5, heartbeat_timeout=0.0))
    made.passes(10_000)
    assert made.session.connection.is_joined
    assert not made.all(Beat)
    assert heartbeat_interval(replace(CONFIG, heartbeat_timeout=1e-300), None) == LEAST_HEARTBEAT_S


def test_unanswered_heartbeats_break_the_connection(ready: Desk) -> None:
    for _ in range(100):
        ready.passes(10.0)
        ready.hears(Notice("alive"))
    heard = ready.now
    while ready.session.connection.is_joined:
        ready.passes(1.0)
    assert ready.all(Close)
    assert 30 <= ready.now - heard < 40


def test_leaving_notifies_the_broker_and_ends_the_session(ready: Desk) -> None:
    ready.happens(Depart("done"))
    assert ready.sent(Leave) == [Leave(b"\1" * 16, "done")]
    assert ready.happens(Disconnected("It broke."), Tick()) == []
    never_joined = desk()
    assert never_joined.happens(Depart()) == []
    assert never_joined.session.phase is Phase.LEFT


def test_action_is_answered_once(ready: Desk) -> None:
    ready.happens(Ask(Control("status", 1)))
    assert ready.sent(Control) == [Control("status", 1)]
    answer = Result(1, True, "fine", {"a": 1})
    ready.hears(answer, answer)
    assert ready.effects == [Answered(1, True, "fine", {"a": 1})]


def test_action_that_may_have_been_executed_is_never_sent_twice(ready: Desk) -> None:
    ready.happens(Ask(Control("shutdown", 1)), Ask(Control("status", 2)))
    ready.happens(Disconnected("It broke."))
    assert [(answered.request, answered.ok) for answered in ready.all(Answered)] == [(1, None)]
    ready.passes(LONGEST_BACKOFF_S)
    assert not ready.connects().sent(Control)
    ready.is_welcomed(version(0))
    assert [control.action for control in ready.sent(Control)] == ["status"]


def test_withdrawn_action_is_not_sent_later(ready: Desk) -> None:
    ready.happens(Disconnected("It broke."), Ask(Control("shutdown", 1)), Withdraw(1))
    ready.passes(LONGEST_BACKOFF_S)
    ready.connects().is_welcomed(version(0))
    assert not ready.sent(Control)


def test_observer_pulls_with_credit_and_without_joining() -> None:
    observer = Desk(Session(None, lambda: 0))
    observer.happens(Start(), Connected())
    assert not observer.sent(Join)
    terms = Terms(CONFIG, (), cut(MANIFEST, CONFIG, ()))
    observer.happens(Observe(terms), RequestVersion(0), RequestVersion(FROZEN))
    pulls = observer.sent(Pull)
    assert [(pull.session, pull.credit) for pull in pulls] == [(None, DOWNLOAD_WINDOW), (None, 0)]
    observer.receives(version(5))
    assert observer.all(Deliver)
    assert all(credit.session is None for credit in observer.sent(Credit))


@pytest.mark.parametrize(
    ("theirs", "is_another_branch"),
    [
        (version(4, tag=99), True),
        (version(3, tag=99), True),
        (version(4), False),
        (version(7), False),  # it is ahead
    ],
)
def test_another_branch_is_logged(ready: Desk, theirs: VersionId, is_another_branch: bool) -> None:
    ready.holds(version(4))
    told = []
    for _ in range(2):
        ready.breaks().is_welcomed(theirs)
        told += [say for say in ready.all(Say) if "the broker goes on from" in say.text]
    assert len(told) == is_another_branch
    for say in told:
        assert say.trouble
        assert f"{version(4)}, and the broker goes on from {theirs}" in say.text


@pytest.mark.parametrize(
    ("end", "phase"),
    [
        (Received(Notice("kicked", "An operator removed it.")), Phase.REFUSED),
        (Disconnected("It broke."), Phase.AWAY),
    ],
)
def test_upload_that_is_cut_off_keeps_no_credit(ready: Desk, end: Event, phase: Phase) -> None:
    ready.happens(Offer(gradient()))
    ready.hears(Grant(77, 0, Standing.NEW, None, 4), Ack(77, 0, (0,), 50))
    ready.happens(end)
    assert ready.session.phase is phase
    ready.hears(Grant(77, 0, Standing.NEW, None, 4), Ack(77, 0, (1,), 9))
    assert not ready.chunks_sent
    assert not any(any(upload.credits) for upload in ready.session.uploads)
