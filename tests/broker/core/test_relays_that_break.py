"""Relays that are lost while the hub is at work on what they hold."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_broker.config import BrokerConfig
from diloco_broker.core import events
from diloco_protocol import messages
from diloco_protocol.errors import Code
from diloco_protocol.relays import way
from kit.core_harness import Puppet, Stage, a_stage
from kit.noted_tensors import CHUNK_ELEMENTS, Payload

SIZE = 4 * CHUNK_ELEMENTS


def two_at_a_relay(**options: Any) -> tuple[Stage, RelayPuppet, Puppet, Puppet]:
    """Workers a and b of a relay, with the parameters, before their first push."""
    stage = a_stage(2, relays=True, **options)
    a, b, north = stage.worker("a"), stage.worker("b"), RelayPuppet(stage, "north")
    for worker in (a, b):
        north.joins(worker)
    stage.provide()
    a.pulls()
    b.pulls()
    return stage, north, a, b


class RelayPuppet:
    """A relay on the stage, and workers behind it."""

    def __init__(self, stage: Stage, name: str) -> None:
        self.stage = stage
        self.control, self.bulk = stage.route(), stage.route()
        self.held = 0  # chunks
        self.hears(self.control, messages.Attach(name, 1))
        (attached,) = (m for m in stage.inbox[self.control] if isinstance(m, messages.Attached))
        self.hears(self.bulk, messages.Attach(name, 1, attached.token))

    def hears(self, route: bytes, message: messages.Message, payload: object = None) -> None:
        self.stage.happens(events.Received(route, message, payload))

    def joins(self, worker: Puppet) -> None:
        worker.control = way(self.control, worker.worker_id.encode() + b"-control")
        worker.bulk = way(self.bulk, worker.worker_id.encode() + b"-bulk")
        worker.sends(messages.Join(worker.worker_id, manifest=self.stage.manifest))
        worker.session = worker.got(messages.Welcome).session
        worker.sends(messages.Credit(1000, worker.session), on=worker.bulk)

    def holds(self, worker: Puppet, *indexes: int) -> None:
        for index in indexes:
            chunk = messages.Chunk(
                worker.fragment, index, session=worker.session, push_id=worker.push_id
            )
            worker.sends(chunk, messages.Held(self.held, SIZE, 1.0), on=worker.bulk)
            self.held += 1

    def asked(self) -> list[messages.Collect]:
        return [m for m in self.stage.inbox[self.control] if isinstance(m, messages.Collect)]

    def answers(self, *asked: messages.Collect, finite: bool = True) -> None:
        for each in asked:
            numbers = tuple(part.number for part in each.parts)
            answer = messages.Combined(each.request, each.fragment, each.index, numbers, "fp32")
            self.hears(self.bulk, answer, Payload(SIZE, is_finite=finite))

    def forgets(self) -> list[int]:
        """Numbers of the chunks that the hub has released."""
        inbox = self.stage.inbox[self.control]
        return [number for m in inbox if isinstance(m, messages.Forget) for number in m.numbers]

    def dies(self) -> None:
        self.stage.gone |= {self.control, self.bulk}
        self.stage.happens(events.PeerGone(self.control))


def test_relay_that_was_given_up_and_is_there_yet_has_to_connect_again() -> None:
    """Otherwise it would speak for workers whom nobody hears, and learn nothing of it."""
    stage = Stage(BrokerConfig(workers=1, relays=True))
    north = RelayPuppet(stage, "north")
    stage.passes(stage.config.heartbeat_timeout + 1.0)
    assert stage.gone == {north.control, north.bulk}


def test_chunks_of_an_abandoned_push_are_released_while_the_round_is_open() -> None:
    stage, north, a, _ = two_at_a_relay(deterministic=True)
    a.offers(1)
    north.holds(a, 0, 1)
    stage.passes(2.0)
    assert not north.forgets()
    a.offers(2)
    stage.passes(2.0)
    assert sorted(north.forgets()) == [0, 1]


@pytest.mark.parametrize("deterministic", [False, True])
def test_chunk_that_the_hub_does_not_need_is_released(deterministic: bool) -> None:
    """It has arrived before, on another connection."""
    stage, north, a, _ = two_at_a_relay(deterministic=deterministic)
    a.offers(1)
    north.holds(a, 0)
    north.holds(a, 0)
    stage.passes(2.0)
    assert north.forgets() == [1]


def test_relay_cannot_give_two_chunks_one_number() -> None:
    _, north, a, b = two_at_a_relay()
    a.offers(1)
    b.offers(2)
    north.holds(a, 0)
    north.held -= 1
    north.holds(b, 0)
    assert b.got(messages.Error).code == Code.BAD_CHUNK


def test_worker_that_died_is_removed_though_its_chunks_arrive_later() -> None:
    """They come on the relay's other connection. The relay reports again when a probe fails."""
    stage, north, a, b = two_at_a_relay()
    a.offers(1)
    north.hears(north.control, messages.Gone(b"a-control"))
    north.holds(a, 0)
    for _ in range(4):
        stage.passes(1.0)
        b.beats()
        north.hears(north.control, messages.Probe(0))
        probes = [
            m
            for m in stage.inbox[a.control]
            if isinstance(m, messages.Notice) and m.what == "alive"
        ]
        if probes:
            north.hears(north.control, messages.Gone(b"a-control"))
    assert stage.here == {"b"}


def test_push_that_a_round_had_chosen_is_not_late_when_its_relay_died() -> None:
    stage, north, a, b = two_at_a_relay(quorum=2, late="drop")
    for worker, push_id in ((a, 1), (b, 2)):
        worker.offers(push_id)
        north.holds(worker, 0, 1, 2)
        worker.commits()
    assert len(north.asked()) == 3
    north.dies()
    stage.passes(stage.config.disconnect_grace + 0.3)
    a.session = None
    a.joins()
    assert a.offers(1).standing is messages.Standing.NEW


def test_relay_that_sends_an_infinite_sum_is_disconnected() -> None:
    stage, north, a, b = two_at_a_relay()
    for worker, push_id in ((a, 1), (b, 2)):
        worker.offers(push_id)
        north.holds(worker, 0, 1, 2)
    north.answers(*north.asked()[:2])
    north.answers(north.asked()[2], finite=False)
    assert north.control in stage.gone
    assert not a.all(messages.Error) and not b.all(messages.Error)


def test_connection_that_is_in_use_cannot_attach_another_relay() -> None:
    stage, north, a, _ = two_at_a_relay()
    a.offers(1)
    north.hears(north.control, messages.Attach("south", 2))
    assert [relay["name"] for relay in stage.shown()["relays"]] == ["north"]


def test_many_relays_can_probe_the_hub_each_second() -> None:
    stage = Stage(BrokerConfig(workers=1, relays=True))
    relays = [RelayPuppet(stage, f"relay-{number}") for number in range(200)]
    for _ in range(3):
        stage.passes(1.0)
        for relay in relays:
            relay.hears(relay.control, messages.Probe(0))
    assert all(
        sum(isinstance(m, messages.Probe) for m in stage.inbox[relay.control]) == 3
        for relay in relays
    )


@pytest.mark.parametrize(
    ("options", "combines"),
    [
        ({}, True),
        ({"wire_dtype": "int4z"}, True),
        ({"wire_dtype": "sparse:128"}, False),
        ({"aggregate": "rda"}, False),
        ({"mode": "async"}, False),
    ],
)
def test_relays_combine_pushes_whose_mean_is_of_their_kind(
    options: dict[str, Any], combines: bool
) -> None:
    """The mean of sparse pushes is not sparse."""
    stage, route = Stage(BrokerConfig(workers=2, relays=True, **options)), b"north"
    stage.inbox[route] = []
    stage.happens(events.Received(route, messages.Attach("north", 1)))
    (attached,) = (m for m in stage.inbox[route] if isinstance(m, messages.Attached))
    assert attached.combines is combines
