"""The connection of a process that does not lead, between a real leader and a scripted broker."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import zmq

from diloco_protocol import Kind, Manifest, TensorEntry, VersionId, lay_out, pack
from diloco_protocol.messages import Chunk, Lane, decode
from diloco_worker.session import events
from diloco_worker.transport.lanes.hub import Hub
from diloco_worker.transport.lanes.lane import LaneThread
from diloco_worker.transport.lanes.lane_buffers import LaneBuffers, numbers_of

PATIENCE_S = 10.0
CHUNK = 300
VERSION = VersionId("run", 1, 7)


class Scene:
    """A leader, one other process's thread, and the broker that this is connected to."""

    def __init__(self) -> None:
        layout = lay_out(
            Manifest((TensorEntry("w", (4 * CHUNK,), "float32", Kind.TRAINABLE),)),
            chunk_elements=CHUNK,
        )
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.broker = self.context.socket(zmq.ROUTER)
        self.address = f"tcp://127.0.0.1:{self.broker.bind_to_random_port('tcp://127.0.0.1')}"
        self.hub = Hub(2)
        self.lane = LaneThread(self.hub.meeting, 1)
        part = layout.fragments[0]
        self.lane.buffers = LaneBuffers((part,), (numbers_of((1, 1, 1, 1), 1),))
        self.heard: list[events.Event] = []
        self.lane.start()

    def opens(self, reply: str, address: str = "", shortcut: str = "") -> bytes:
        """The broker's route to the new connection."""
        self.hub.open(address or self.address, (Lane(b"session", 1, (b"\x0f",)),), reply, shortcut)
        self.until(lambda: bool(self.broker.poll(0)))
        route, header = self.broker.recv_multipart()
        assert isinstance(decode(header), Lane)
        return route

    def says(self, route: bytes, index: int, payload: bytes) -> None:
        self.broker.send_multipart([route, *pack(Chunk(0, index, version=VERSION), payload)])

    def until(self, holds: Callable[[], bool]) -> None:
        ends = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < ends, self.heard
            self.hub.socket.poll(20)
            self.heard += self.hub.receive()

    def hears(self, kind: type[events.Event]) -> events.Event:
        self.until(lambda: any(isinstance(each, kind) for each in self.heard))
        (found,) = [each for each in self.heard if isinstance(each, kind)]
        return found

    def close(self) -> None:
        self.lane.close()
        self.hub.close()
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
def test_connection_over_which_something_wrong_comes_is_opened_anew(
    scene: Scene, index: int, size: int, why: str
) -> None:
    """All that came behind it is void, and the thread goes on with the next connection."""
    route = scene.opens("fp32")
    for _ in range(3):
        scene.says(route, index, bytes(size))
    broken = scene.hears(events.Disconnected)
    assert isinstance(broken, events.Disconnected) and why in broken.reason
    scene.hub.close_all()
    scene.heard.clear()
    route = scene.opens("fp32")
    for number in range(4):
        scene.says(route, number, torch.full((CHUNK,), float(number)).numpy().tobytes())
    scene.until(lambda: len(scene.heard) == 4)
    vector = next(iter(scene.lane.take(0, VERSION).vectors.values()))
    assert vector.view(4, CHUNK)[:, 0].tolist() == [0, 1, 2, 3]
    assert not scene.lane.has_ended and scene.lane.last_error is None


def test_each_connection_has_the_dtype_of_its_replies(scene: Scene) -> None:
    route = scene.opens("fp32")
    scene.says(route, 0, torch.ones(CHUNK).numpy().tobytes())
    scene.hears(events.ArrivedElsewhere)
    scene.hub.close_all()
    scene.heard.clear()
    route = scene.opens("bf16")
    wire = torch.full((CHUNK,), 2.0, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    for number in range(4):
        scene.says(route, number, wire)
    scene.until(lambda: len(scene.heard) == 4)
    (vector,) = scene.lane.take(0, VERSION).vectors.values()
    assert vector.tolist() == [2.0] * 4 * CHUNK


@pytest.mark.parametrize("is_brokers", [True, False])
def test_connection_goes_through_a_unix_socket_that_is_called_as_those_of_brokers(
    scene: Scene, is_brokers: bool
) -> None:
    prefix = "diloco" if is_brokers else "other"
    place = f"ipc://@{prefix}-{secrets.token_hex(8)}"
    scene.broker.bind(place)
    nobody = "tcp://127.0.0.1:1"
    scene.opens("fp32", nobody if is_brokers else scene.address, place)
