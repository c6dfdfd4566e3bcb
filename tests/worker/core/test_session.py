"""The worker's state machine, with a clock of our own and no socket."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from diloco_protocol import (
    Bitmap,
    Ledger,
    RunConfig,
    VersionId,
)
from diloco_protocol.messages import (
    Ack,
    Chunk,
    Commit,
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
    Released,
    Result,
    Standing,
)
from diloco_worker.core.connection import Phase
from diloco_worker.core.downloads import DOWNLOAD_WINDOW
from diloco_worker.core.effects import (
    Answered,
    Beat,
    Carried,
    Close,
    Deliver,
    Effect,
    Granted,
    JoinRefused,
    Open,
    Paced,
    Restarting,
    Say,
    Send,
    SendChunk,
    Stopping,
)
from diloco_worker.core.events import (
    Ask,
    Connected,
    Depart,
    Disconnected,
    Observe,
    Offer,
    RequestVersion,
    Start,
    Tick,
    Withdraw,
)
from diloco_worker.core.session import Session
from diloco_worker.core.timeouts import JOIN_PATIENCE_S, LONGEST_BACKOFF_S, REFUSED_RETRY_S
from kit.session_harness import (
    CHUNKS,
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

# Joining.


def test_join_is_sent_when_control_is_up_and_not_before(fresh: Desk) -> None:
    assert fresh.effects == [Open()]
    fresh.passes(60)
    assert not fresh.sent(Join)
    fresh.connects()
    (join,) = fresh.sent(Join)
    assert (join.worker_id, join.manifest, join.session, join.run) == ("me", MANIFEST, None, None)


def test_welcome_is_answered_with_credit_on_bulk_before_any_pull(fresh: Desk) -> None:
    fresh.connects().is_welcomed(version(0))
    sends = fresh.all(Send)
    assert sends[0] == Send(Credit(DOWNLOAD_WINDOW, b"\1" * 16), bulk=True)
    assert [(p.fragment, p.after) for p in fresh.sent(Pull)] == [(0, -1), (FROZEN, -1)]
    assert fresh.session.connection.is_joined


def test_broker_that_asks_to_wait_is_asked_again_within_two_seconds(fresh: Desk) -> None:
    fresh.connects().hears(Error("id_taken", "Soon.", retry=True))
    assert [say.text for say in fresh.all(Say)] == ["Soon."]
    fresh.passes(LONGEST_BACKOFF_S)
    assert len(fresh.sent(Join)) == 1


def test_stopping_broker_is_asked_again_although_it_says_no(fresh: Desk) -> None:
    fresh.connects().hears(Error("stopping", "Bye.", retry=False))
    assert not fresh.all(JoinRefused)
    fresh.passes(LONGEST_BACKOFF_S)
    assert fresh.sent(Join)


def test_refusal_at_joining_is_final(fresh: Desk) -> None:
    fresh.connects().hears(Error("model_differs", "It lacks head."))
    assert fresh.effects == [JoinRefused("model_differs", "It lacks head.", final=True)]
    fresh.passes(10 * REFUSED_RETRY_S)
    assert not fresh.effects
    assert fresh.session.wakes_at() is None


def test_refusal_in_mid_run_is_tried_again_later(ready: Desk) -> None:
    ready.breaks().hears(Error("id_taken", "Another one is alive."))
    assert ready.effects == [JoinRefused("id_taken", "Another one is alive.", final=False)]
    ready.passes(REFUSED_RETRY_S / 2)
    assert not ready.sent(Join)
    ready.passes(REFUSED_RETRY_S / 2)
    assert ready.sent(Join)


def test_unanswered_join_is_given_up_for_new_connections(fresh: Desk) -> None:
    fresh.connects()
    fresh.passes(JOIN_PATIENCE_S)
    assert fresh.all(Close)
    fresh.passes(LONGEST_BACKOFF_S)
    assert fresh.all(Open)


def test_connections_that_break_again_and_again_are_opened_ever_slower(fresh: Desk) -> None:
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


@pytest.mark.parametrize(("interval", "accepted"), [(0.0, False), (30.0, False), (29.0, True)])
def test_heartbeat_interval_must_fit_what_the_broker_tolerates(
    interval: float, accepted: bool
) -> None:
    made = desk(heartbeat_interval=interval).connects().is_welcomed(version(0))
    assert made.session.connection.is_joined is accepted
    if not accepted:
        (refusal,) = made.all(JoinRefused)
        assert refusal.final
        assert "heartbeat" in refusal.text
        assert made.sent(Leave), "the broker would wait for a worker that is not coming"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (RunConfig("gossip", 5), "mode 'gossip'"),
        (RunConfig("sync", 5, fragment_merge="sum"), "merges by 'sum'"),
        (RunConfig("sync", 3, num_fragments=4), "sync_every is 3 and the run has 4 fragments"),
        (RunConfig("sync", 5, num_fragments=2), "there are 0 for 2 tensors"),
    ],
)
def test_run_that_this_release_cannot_train_is_refused_with_a_sentence(
    config: RunConfig, words: str
) -> None:
    made = desk().connects().is_welcomed(version(0), config=config)
    (refusal,) = made.all(JoinRefused)
    assert words in refusal.text
    assert refusal.final
    assert made.sent(Leave), "the broker would wait for a worker that is not coming"


@pytest.mark.parametrize("config", [RunConfig("async", 5), RunConfig("async", 5, dylu=True)])
def test_asynchronous_run_is_joined(config: RunConfig) -> None:
    assert desk().connects().is_welcomed(version(0), config=config).session.connection.is_joined


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
def test_broker_that_comes_back_with_what_flights_depend_on_changed_is_refused(
    ready: Desk, name: str, value: Any
) -> None:
    ready.breaks().is_welcomed(version(0), config=replace(CONFIG, **{name: value}))
    (refusal,) = ready.all(JoinRefused)
    in_words = {"fragment_delay_auto": "fragment_sync_delay auto"}
    assert in_words.get(name, f"{name} {value}") in refusal.text
    assert not refusal.final


def test_broker_that_comes_back_with_another_h_is_joined(ready: Desk) -> None:
    ready.breaks().is_welcomed(version(0), config=replace(CONFIG, sync_every=9, wire_dtype="fp32"))
    assert ready.session.connection.is_joined
    assert ready.session.config == replace(CONFIG, sync_every=9, wire_dtype="fp32")


# Fragments.


def streaming() -> Desk:
    """A worker that has joined a run with three fragments and holds version 0 of each."""
    made = desk(manifest=LAYERS).connects()
    made.is_welcomed(*[version(0)] * 3, config=STREAMING, plan=(2, 0, 1))
    for fragment in range(3):
        made.receives(version(0), fragment=fragment, chunks=1)
    return made


def test_model_is_cut_by_the_plan_in_the_welcome() -> None:
    layout = streaming().session.layout
    assert layout is not None
    assert [part.places[0].entry.name for part in layout.fragments] == ["b", "c", "a"]


def test_broker_that_comes_back_with_another_plan_is_refused() -> None:
    made = streaming().breaks()
    made.is_welcomed(*[version(0)] * 3, config=STREAMING, plan=(0, 1, 2))
    (refusal,) = made.all(JoinRefused)
    assert "another plan" in refusal.text
    assert not refusal.final


def test_every_fragment_may_be_in_flight_and_the_oldest_is_offered_first_again() -> None:
    made = streaming()
    for fragment in (2, 0, 1):
        made.happens(Offer(Push(b"", 70 + fragment, fragment, 1, "bf16", base=version(0))))
    made.breaks().is_welcomed(*[version(0)] * 3, config=STREAMING, plan=(2, 0, 1))
    assert [push.push_id for push in made.sent(Push)] == [72, 70, 71]
    made.receives(version(1), whole(70), fragment=0, chunks=1)
    assert [deliver.counted for deliver in made.all(Deliver)] == [70]
    made.receives(version(1), whole(72), fragment=2, chunks=1)
    assert [deliver.counted for deliver in made.all(Deliver)] == [72]


def test_rounds_are_told_as_the_broker_names_them() -> None:
    made = streaming()
    made.happens(Offer(Push(b"", 70, 0, 1, "bf16", base=version(0))))
    made.hears(
        Grant(70, 0, Standing.WAIT, round=3),
        Grant(70, 0, Standing.NEW, credit=1, round=3),
        Notice("carried", "Too late.", fragment=0, round=6),
        Grant(99, 0, Standing.NEW, credit=1, round=8),  # of a push that is long over
    )
    told = [effect for effect in made.effects if isinstance(effect, Granted | Carried)]
    assert told == [
        Granted(70, 0, Standing.WAIT, 3),
        Granted(70, 0, Standing.NEW, 3),
        Carried(0, 6),
    ]


def test_h_of_its_own_comes_with_the_answer_to_a_heartbeat(ready: Desk) -> None:
    ready.hears(Notice("alive"), Notice("alive", sync_every=7))
    assert ready.effects == [Paced(7)]


# Heartbeats and silence.


def test_heartbeat_is_sent_at_a_third_of_what_the_broker_tolerates(ready: Desk) -> None:
    ready.hears(Notice("alive"))
    ready.passes(9.9)
    assert not ready.all(Beat)
    ready.passes(0.2)
    assert ready.all(Beat) == [Beat(b"\1" * 16, uploading=False)]


def test_ping_is_answered_at_once(ready: Desk) -> None:
    ready.hears(Notice("ping"))
    assert len(ready.all(Beat)) == 1


def test_heartbeats_can_be_turned_off() -> None:
    made = desk(heartbeat_interval=0.0).connects()
    made.is_welcomed(version(0), config=RunConfig("sync", 5, heartbeat_timeout=0.0))
    made.passes(10_000)
    assert made.session.connection.is_joined
    assert not made.all(Beat)


def test_silent_broker_counts_as_a_broken_connection(ready: Desk) -> None:
    heard = ready.now
    while ready.session.connection.is_joined:
        ready.passes(1.0)
        assert ready.now - heard < 40
    assert ready.all(Close)
    assert ready.now - heard >= 30


def test_broker_that_answers_heartbeats_is_never_given_up(ready: Desk) -> None:
    for _ in range(100):
        ready.passes(10.0)
        ready.hears(Notice("alive"))
        assert ready.session.connection.is_joined


# Notices, asking, leaving.


def test_shutdown_is_told(ready: Desk) -> None:
    ready.hears(Notice("shutdown", "SIGTERM."))
    assert ready.effects == [Stopping("SIGTERM.")]
    ready.hears(Notice("restarting", "SIGTERM."))
    assert ready.effects == [Restarting("SIGTERM.")]


def test_leaving_is_told_to_the_broker_and_ends_the_session(ready: Desk) -> None:
    ready.happens(Depart("done"))
    assert ready.sent(Leave) == [Leave(b"\1" * 16, "done")]
    assert ready.happens(Disconnected("It broke."), Tick()) == []


def test_leaving_without_having_joined_says_nothing(fresh: Desk) -> None:
    fresh.happens(Depart())
    assert not fresh.effects
    assert fresh.session.phase is Phase.LEFT


def test_action_is_answered_once(ready: Desk) -> None:
    ready.happens(Ask(1, "status"))
    assert ready.sent(Control) == [Control("status", 1)]
    answer = Result(1, True, "fine", {"a": 1})
    ready.hears(answer, answer)
    assert ready.effects == [Answered(1, True, "fine", {"a": 1})]


def test_action_that_may_have_been_carried_out_is_never_sent_twice(ready: Desk) -> None:
    ready.happens(Ask(1, "shutdown"), Ask(2, "status"))
    ready.breaks()
    assert not ready.sent(Control)
    ready.is_welcomed(version(0))
    assert [control.action for control in ready.sent(Control)] == ["status"]


def test_unanswered_action_is_told_when_the_connection_breaks(ready: Desk) -> None:
    ready.happens(Ask(1, "shutdown"))
    ready.happens(Disconnected("It broke."))
    (answered,) = ready.all(Answered)
    assert (answered.request, answered.ok) == (1, None)


def test_action_that_was_withdrawn_is_not_sent_later(ready: Desk) -> None:
    ready.happens(Disconnected("It broke."), Ask(1, "shutdown"), Withdraw(1))
    ready.passes(LONGEST_BACKOFF_S)
    ready.connects().is_welcomed(version(0))
    assert not ready.sent(Control)


def test_observer_pulls_with_credit_and_without_joining() -> None:
    observer = Desk(Session(None, lambda: 0))
    observer.happens(Start(), Connected())
    assert not observer.sent(Join)
    observer.happens(Observe(MANIFEST, CONFIG), RequestVersion(0), RequestVersion(FROZEN))
    pulls = observer.sent(Pull)
    assert [(pull.session, pull.credit) for pull in pulls] == [(None, DOWNLOAD_WINDOW), (None, 0)]
    observer.receives(version(5))
    assert observer.all(Deliver)
    assert all(credit.session is None for credit in observer.sent(Credit))


@pytest.mark.parametrize("message", [Heartbeat(b"", 1), Join("x", MANIFEST), Commit(b"", 1, 0)])
def test_message_that_only_workers_send_is_said_aloud(ready: Desk, message: Message) -> None:
    ready.hears(message)
    assert [say.trouble for say in ready.all(Say)] == [True]


# All at once.


class LoyalBroker:
    """The least broker that keeps the specification: one worker, a round for each push.

    Counts every chunk of every push into versions, so that a test can ask what was counted how often.
    """

    def __init__(self, made: Desk, dice: random.Random) -> None:
        self.desk = made
        self.dice = dice
        self.at = 0
        self.ledger = Ledger()
        self.held: dict[int, Bitmap] = {}
        self.counted: Counter[tuple[int, int]] = Counter()
        self.queue: list[Message] = []
        self.pulls: dict[int, Pull] = {}
        self.credit = 0

    def takes(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Close):
                self.queue.clear()
                self.pulls.clear()
                self.credit = 0
            elif isinstance(effect, SendChunk):
                self._chunk(effect)
            elif isinstance(effect, Send):
                self._message(effect.message)

    def _chunk(self, effect: SendChunk) -> None:
        held = self.held[effect.push_id]
        if effect.index not in held:
            held.add(effect.index)
            self.counted[effect.push_id, effect.index] += 1
        self.queue.append(Ack(effect.push_id, 0, (effect.index,)))
        if held.is_full and not self.ledger.names_whole("me", effect.push_id):
            self.at += 1
            self.ledger = self.ledger.with_push("me", effect.push_id, held)
            self._serve()

    def _message(self, message: Message) -> None:
        if isinstance(message, Push):
            push_id = message.push_id
            if self.ledger.names_whole("me", push_id):
                self.queue.append(Grant(push_id, 0, Standing.COUNTED))
                return
            held = self.held.setdefault(push_id, Bitmap(CHUNKS))
            standing = Standing.RESUME if held else Standing.NEW
            self.queue.append(Grant(push_id, 0, standing, held.to_bytes(), credit=3))
        elif isinstance(message, Pull):
            self.pulls[message.fragment] = message
            self._serve()

    def _serve(self) -> None:
        pull = self.pulls.get(0)
        if pull is None or self.at <= pull.after:
            return
        del self.pulls[0]
        have = Bitmap(CHUNKS)
        if pull.held is not None and pull.held_version == version(self.at):
            have = Bitmap.from_bytes(pull.held, CHUNKS)
        chunks = [Chunk(0, index, version=version(self.at)) for index in have.missing()]
        messages: list[Message] = [*chunks, Released(0, version(self.at), self.ledger)]
        self.dice.shuffle(messages)
        self.queue += messages


@pytest.mark.parametrize("seed", range(30))
def test_every_chunk_counts_once_whatever_breaks(seed: int) -> None:
    dice = random.Random(seed)
    made = desk().connects().is_welcomed(version(0))
    made.receives(version(0))
    made.receives(version(0), fragment=FROZEN, chunks=1)
    broker = LoyalBroker(made, dice)
    pushed, delivered = 0, 0
    broker.takes(made.happens(Offer(gradient(1000))))
    for _ in range(3000):
        if dice.random() < 0.02:
            broker.takes(made.happens(Disconnected("It broke.")))
            broker.takes(made.passes(LONGEST_BACKOFF_S))
            broker.takes(made.happens(Connected()))
            made.is_welcomed(version(broker.at))
            broker.takes(made.effects)
        elif broker.queue:
            effects = made.hears(broker.queue.pop(0))
            broker.takes(effects)
            for effect in made.all(Deliver):
                if effect.counted is not None:
                    delivered += 1
                    assert effect.counted == 1000 + pushed
                    pushed += 1
                    push = gradient(1000 + pushed, base=effect.released.version.counter)
                    broker.takes(made.happens(Offer(push)))
    assert delivered > 10
    assert set(broker.counted.values()) == {1}
    assert broker.at in (delivered, delivered + 1)


# Branches.


@pytest.mark.parametrize("theirs", [version(4, tag=99), version(3, tag=99)])
def test_worker_says_that_the_broker_goes_on_from_another_branch(
    ready: Desk, theirs: VersionId
) -> None:
    ready.holds(version(4))
    ready.breaks().is_welcomed(theirs)
    said = [say for say in ready.all(Say) if f"{version(4)}, and the broker goes on" in say.text]
    assert [say.trouble for say in said] == [True]
    assert f"from {theirs}" in said[0].text
    ready.breaks().is_welcomed(theirs)
    assert not any("goes on from" in say.text for say in ready.all(Say)), "once is enough"


@pytest.mark.parametrize("theirs", [version(4), version(7)])
def test_broker_that_has_what_the_worker_has_or_is_ahead_is_nothing_to_speak_of(
    ready: Desk, theirs: VersionId
) -> None:
    ready.holds(version(4))
    ready.breaks().is_welcomed(theirs)
    assert not any("goes on from" in say.text for say in ready.all(Say))
