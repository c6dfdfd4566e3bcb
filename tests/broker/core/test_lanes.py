"""A worker of several processes takes and sends its chunks on a connection of each: its lanes."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from diloco_broker.core.events import PeerGone, Received
from diloco_broker.core.versions.readers import MAX_READER_CREDIT, lane_credit
from diloco_protocol import Bitmap
from diloco_protocol.messages import Ack, Chunk, Credit, Error, Lane, Rejoin
from kit.core_harness import Puppet, Stage, alone
from kit.noted_tensors import CHUNK_ELEMENTS, Payload

CHUNKS = 12


@dataclass
class Group:
    """A worker of several processes; process i owns every k-th chunk, from i on."""

    stage: Stage
    puppet: Puppet
    count: int
    lanes: list[bytes] = field(default_factory=list)

    def share(self, index: int) -> Bitmap:
        bitmap = Bitmap(CHUNKS)
        for chunk in range(index, CHUNKS, self.count):
            bitmap.add(chunk)
        return bitmap

    def binds(self, lane: int, credit: int = 4, **fields: object) -> None:
        index = min(lane, self.count - 1)
        shares = (self.share(index).to_bytes(), b"")
        told = {"session": self.puppet.token(), "index": lane, "shares": shares, "credit": credit}
        message = Lane(**{**told, **fields})  # type: ignore[arg-type]
        self.stage.happens(Received(self.lanes[lane], message))

    def binds_all(self, credit: int = 64) -> Group:
        for index in range(self.count):
            self.binds(index, credit)
        return self

    def came(self, index: int) -> list[int]:
        """The chunks that a lane was sent, in order."""
        return [chunk.index for chunk, _ in self.stage.received.get(self.lanes[index], [])]

    def delivers(self, index: int, chunks: list[int]) -> None:
        puppet = self.puppet
        for chunk in chunks:
            message = Chunk(0, chunk, session=puppet.session, push_id=puppet.push_id)
            payload = Payload(4 * CHUNK_ELEMENTS)
            self.stage.happens(Received(self.lanes[index], message, payload))

    def error(self, index: int) -> Error:
        found = [m for m in self.stage.inbox.get(self.lanes[index], ()) if isinstance(m, Error)]
        return found[-1]


def group(count: int = 2) -> tuple[Group, Puppet]:
    """One that has joined beside a plain worker a, and has not bound its lanes yet."""
    stage, a = alone(CHUNKS)
    puppet = stage.worker("g").joins(processes=count)
    return Group(stage, puppet, count, [stage.route() for _ in range(count)]), a


def bound(credit: int = 64) -> Group:
    """One of two processes whose lanes are bound, and which asks for versions."""
    made, _ = group(2)
    made.binds_all(credit)
    made.puppet.pulls()
    return made


def test_each_lane_gets_its_share_against_its_own_credit() -> None:
    made, _ = group(3)
    for index in range(3):
        made.binds(index, credit=index)
    made.puppet.pulls()
    assert [made.came(index) for index in range(3)] == [[], [1], [2, 5]]
    made.stage.happens(Received(made.lanes[0], Credit(4, made.puppet.session)))
    assert [made.came(index) for index in range(3)] == [[0, 3, 6, 9], [1], [2, 5]]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_chunks_wait_for_their_lane_in_whatever_order_the_lanes_come(order: list[int]) -> None:
    made, _ = group(3)
    made.puppet.pulls()
    for index in order:
        made.binds(index)
    assert [made.came(index) for index in range(3)] == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]


def test_credit_that_overtakes_the_first_lane_counts() -> None:
    made, _ = group(2)
    made.binds(1, credit=1)
    made.stage.happens(Received(made.lanes[1], Credit(2, made.puppet.session)))
    made.puppet.pulls()
    made.binds(0)
    assert made.came(1) == [1, 3, 5]


def test_credit_of_a_lane_is_capped() -> None:
    made, _ = group(8)
    for index in range(8):
        made.binds(index, credit=10**9)
    for _ in range(100):
        made.stage.happens(Received(made.lanes[2], Credit(50, made.puppet.session)))
    (reader,) = [r for r in made.stage.state.versions.readers.values() if len(r.lanes) == 8]
    assert {lane.credit for lane in reader.lanes.values()} == {lane_credit(8)}
    assert 8 * lane_credit(8) == MAX_READER_CREDIT


def test_credit_of_a_push_is_that_of_each_lane_and_comes_back_to_it() -> None:
    made = bound()
    grant = made.puppet.offers(7)
    own = list(made.share(1))
    made.delivers(1, own[: grant.credit])
    acked = [index for ack in made.puppet.all(Ack) for index in ack.chunks]
    assert acked == own[: grant.credit]
    assert {ack.lane for ack in made.puppet.all(Ack) if ack.credit} <= {1}
    upload = made.stage.state.members.named("g").uploads.of(0)
    assert upload.windows[0].credit == grant.credit, "the other lane has all of its own"


def test_lost_lane_is_not_a_death() -> None:
    made = bound()
    made.stage.happens(PeerGone(made.lanes[1]))
    assert "g" in made.stage.here
    made.puppet.joins(processes=2)
    made.lanes = [made.stage.route() for _ in range(2)]
    made.puppet.pulls()
    made.binds_all()
    assert sorted(made.came(0) + made.came(1)) == list(range(CHUNKS))


def test_lanes_keep_no_worker_alive_whose_control_connection_is_gone() -> None:
    made = bound()
    made.stage.happens(PeerGone(made.puppet.control))
    made.stage.happens(Received(made.lanes[1], Credit(1, made.puppet.session)))
    made.stage.passes(made.stage.config.disconnect_grace + 0.2)
    assert "g" not in made.stage.here
    made.stage.happens(Received(made.lanes[1], Credit(1, made.puppet.session)))
    assert any(isinstance(m, Rejoin) for m in made.stage.inbox[made.lanes[1]])


@pytest.mark.parametrize("shares", [None, (b"\xff" * 9, b""), (b"",), (b"",) * 3])
def test_lane_that_does_not_fit_costs_its_sender_an_error(shares: tuple[bytes, ...] | None) -> None:
    made, _ = group(2)
    made.lanes.append(made.stage.route())
    index = 2 if shares is None else 1
    if shares is None:
        made.binds(index)
    else:
        made.binds(index, shares=shares)
    assert made.error(index)
    assert not made.stage.state.members.named("g").lanes


def test_a_connection_is_one_lane() -> None:
    made, a = group(2)
    made.binds(1)
    made.lanes[0] = made.lanes[1]
    made.binds(0)
    assert made.error(0)
    plain = Group(made.stage, a, 1, [made.stage.route()])
    plain.binds(0)
    assert plain.error(0)


def test_lane_that_comes_twice_makes_the_worker_join_again() -> None:
    made = bound()
    made.lanes[1] = made.stage.route()
    made.binds(1)
    assert made.puppet.last(Rejoin) is not None


def test_overlapping_shares_send_each_chunk_once() -> None:
    made, _ = group(2)
    every = Bitmap.full(CHUNKS).to_bytes()
    made.binds(0, credit=64, shares=(every, b""))
    made.binds(1, credit=64, shares=(every, b""))
    made.puppet.pulls()
    assert (made.came(0), made.came(1)) == (list(range(CHUNKS)), [])


def test_worker_says_how_many_processes_it_is() -> None:
    stage, _ = alone(CHUNKS)
    for count in (0, 257):
        made = stage.worker("g").joins(processes=count)
        assert "256" in made.error().text


def test_credit_on_the_others_is_void_when_a_lane_is_lost() -> None:
    made = bound(credit=1)
    made.stage.happens(PeerGone(made.lanes[0]))
    for _ in range(3):
        made.stage.happens(Received(made.lanes[1], Credit(1, made.puppet.session)))
    made.puppet.pulls()
    assert (made.came(0), made.came(1)) == ([0], [1])


def test_chunks_on_the_others_cost_no_push_when_a_lane_is_lost() -> None:
    """They were under way when it broke; the push is offered again on new connections."""
    made = bound()
    made.puppet.offers(7)
    made.stage.happens(PeerGone(made.lanes[0]))
    made.delivers(1, list(made.share(1)))
    assert made.puppet.last(Error) is None
    made.puppet.joins(processes=2)
    made.lanes = [made.stage.route() for _ in range(2)]
    made.binds_all()
    made.puppet.offers(7)
    for index in (0, 1):
        for chunk in made.share(index):
            made.delivers(index, [chunk])
    made.puppet.commits()
    assert made.puppet.last(Error) is None
