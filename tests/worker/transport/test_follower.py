"""The link of a rank other than the leader, between a real leader and a scripted broker."""

import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import pytest
import torch
import zmq

from diloco_protocol import (
    Kind,
    Manifest,
    RunConfig,
    Segment,
    TensorEntry,
    VersionId,
    lay_out,
    pack,
)
from diloco_protocol.messages import Chunk, Credit, Lane, Purpose, Push, decode
from diloco_worker.model.flat_state import FlatState
from diloco_worker.session import events
from diloco_worker.session.compatibility import Terms
from diloco_worker.session.effects import SendChunk
from diloco_worker.transport.between_ranks import Followers, LeaderConnection
from diloco_worker.transport.link import Link

E = TypeVar("E", bound=events.Event)
PATIENCE_S = 10.0
CHUNK = 300
VERSION = VersionId("run", 1, 7)
SEEDING = Push(b"s", 9, 0, 4, base=VERSION, purpose=Purpose.SEEDING, wire_dtype="fp32")


class Scene:
    """A leader, the thread of another process, and the broker that it is connected to."""

    def __init__(self) -> None:
        layout = lay_out(
            Manifest((TensorEntry("w", (4 * CHUNK,), "float32", Kind.TRAINABLE),)),
            chunk_elements=CHUNK,
        )
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.broker = self.context.socket(zmq.ROUTER)
        self.address = f"tcp://127.0.0.1:{self.broker.bind_to_random_port('tcp://127.0.0.1')}"
        self.followers = Followers(2)
        leader = LeaderConnection(self.followers.address, 1)
        self.own: Future[FlatState] = Future()  # the model's own values, once they are read
        self.link = Link(
            "tcp://127.0.0.1:1", None, others=leader, capture=lambda _: self.own.result()
        )
        self.link.terms = Terms(RunConfig("sync", 1), (), layout)
        self.part = layout.fragments[0]
        self.link.share_out(((1, 1, 1, 1), ()), 1, layout.all)
        self.heard: list[events.Event] = []
        self.link.start()

    def opens(self, reply: str, address: str = "", shortcut: str = "") -> bytes:
        """Open a connection; the broker's route to it."""
        lanes = (Lane(b"session", 1, (b"\x0f",)),)
        self.followers.open(address or self.address, lanes, reply, shortcut)
        self.until(lambda: bool(self.broker.poll(0)))
        route, header = self.broker.recv_multipart()
        assert isinstance(decode(header), Lane)
        return route

    def broker_receives(self) -> tuple[Chunk, bytes]:
        """The next chunk of this rank."""
        while True:
            self.until(lambda: bool(self.broker.poll(0)))
            _, header, *payload = self.broker.recv_multipart()
            message = decode(header)
            if isinstance(message, Chunk):
                return message, payload[0]
            assert isinstance(message, Credit)

    def says(self, route: bytes, index: int, payload: bytes) -> None:
        self.broker.send_multipart([route, *pack(Chunk(0, index, version=VERSION), payload)])

    def until(self, holds: Callable[[], bool]) -> None:
        ends = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < ends, self.heard
            self.followers.socket.poll(20)
            self.heard += self.followers.receive()

    def hears(self, kind: type[E]) -> E:
        self.until(lambda: any(isinstance(each, kind) for each in self.heard))
        (found,) = [each for each in self.heard if isinstance(each, kind)]
        return found

    def close(self) -> None:
        self.link.close()
        self.followers.close()
        self.broker.close(linger=0)
        self.context.term()


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("index", "size", "why"),
    [(0, 2 * CHUNK, "600 bytes"), (17, 4 * CHUNK, "not of this process")],
    ids=["wrong length", "not its own"],
)
def test_malformed_message_reopens_the_link(scene: Scene, index: int, size: int, why: str) -> None:
    """All that followed it is void, and the thread goes on with the next connection."""
    route = scene.opens("fp32")
    for _ in range(3):
        scene.says(route, index, bytes(size))
    broken = scene.hears(events.Disconnected)
    assert why in broken.reason
    scene.followers.close_all()
    scene.heard.clear()
    route = scene.opens("fp32")
    for number in range(4):
        scene.says(route, number, torch.full((CHUNK,), float(number)).numpy().tobytes())
    scene.until(lambda: len(scene.heard) == 4)
    vector = next(iter(scene.link.buffers.share_of(0, VERSION).vectors.values()))
    assert vector.view(4, CHUNK)[:, 0].tolist() == [0, 1, 2, 3]
    assert not scene.link.has_ended and scene.link.last_error is None


def test_each_connection_has_the_dtype_of_its_replies(scene: Scene) -> None:
    route = scene.opens("fp32")
    scene.says(route, 0, torch.ones(CHUNK).numpy().tobytes())
    scene.hears(events.ArrivedElsewhere)
    scene.followers.close_all()
    scene.heard.clear()
    route = scene.opens("bf16")
    wire = torch.full((CHUNK,), 2.0, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    for number in range(4):
        scene.says(route, number, wire)
    scene.until(lambda: len(scene.heard) == 4)
    (vector,) = scene.link.buffers.share_of(0, VERSION).vectors.values()
    assert vector.tolist() == [2.0] * 4 * CHUNK


def test_error_costs_a_rank_its_connection(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    failures, store = [MemoryError("no room")], scene.link.buffers.store

    def fail_once(*arguments: Any) -> None:
        if failures:
            raise failures.pop()
        store(*arguments)

    monkeypatch.setattr(scene.link.buffers, "store", fail_once)
    scene.says(scene.opens("fp32"), 0, bytes(4 * CHUNK))
    broken = scene.hears(events.Disconnected)
    assert "no room" in broken.reason
    assert scene.link.last_error is not None and "no room" in scene.link.last_error
    scene.followers.close_all()
    scene.says(scene.opens("fp32"), 0, bytes(4 * CHUNK))
    scene.hears(events.ArrivedElsewhere)


@pytest.mark.parametrize("is_fetched", [True, False], ids=["fetched", "the model's own"])
def test_rank_seeds_its_chunks_of_the_held_version(scene: Scene, is_fetched: bool) -> None:
    """Frozen parameters are not fetched where the model has them already."""
    route = scene.opens("fp32")
    if is_fetched:
        for number in range(4):
            scene.says(route, number, torch.full((CHUNK,), 5.0).numpy().tobytes())
        scene.until(lambda: len(scene.heard) == 4)
    scene.followers.seed(SEEDING)
    scene.followers.send(SendChunk(b"s", 9, 0, 2, lane=1))
    if not is_fetched:
        own = FlatState.empty(scene.part)
        own.vectors[Segment.PARAMETERS].fill_(7.0)
        scene.own.set_result(own)
    chunk, payload = scene.broker_receives()
    assert (chunk.push_id, chunk.index) == (9, 2)
    assert torch.frombuffer(bytearray(payload), dtype=torch.float32).tolist() == CHUNK * [
        5.0 if is_fetched else 7.0
    ]


def test_push_that_ended_early_leaves_the_rank_nothing_to_send(scene: Scene) -> None:
    """The broker may have rejected it meanwhile."""
    scene.opens("fp32")
    delta = FlatState.empty(scene.part)
    delta.vectors[Segment.PARAMETERS].fill_(1.0)
    scene.own.set_result(delta)
    scene.followers.send(SendChunk(b"s", 1, 0, 0, lane=1))
    scene.followers.over(1)
    # The rank has heard that it is over when it sends what it was told to send after it.
    scene.followers.seed(SEEDING)
    scene.followers.send(SendChunk(b"s", 9, 0, 2, lane=1))
    assert scene.broker_receives()[0].push_id == 9
    for push_id in (1, 2):
        scene.link.offer(Push(b"s", push_id, 0, 4, wire_dtype="fp32"), delta)
    scene.followers.send(SendChunk(b"s", 2, 0, 0, lane=1))
    assert scene.broker_receives()[0].push_id == 2


@pytest.mark.parametrize("is_brokers", [True, False])
def test_connection_uses_the_unix_socket_of_a_local_broker(scene: Scene, is_brokers: bool) -> None:
    prefix = "diloco" if is_brokers else "other"
    place = f"ipc://@{prefix}-{secrets.token_hex(8)}"
    scene.broker.bind(place)
    unused = "tcp://127.0.0.1:1"
    scene.opens("fp32", unused if is_brokers else scene.address, place)
