"""What a relay keeps of its site, and sends to relays behind it."""

from __future__ import annotations

from itertools import count
from typing import Any

from diloco_broker.relay import core
from diloco_protocol.chunks import ChunkSpan
from diloco_protocol.messages import (
    Attach,
    Attached,
    Chunk,
    Grant,
    Heartbeat,
    Message,
    Push,
    Standing,
    Via,
)
from diloco_protocol.relays import way
from diloco_protocol.version import VersionId

SESSION = b"session"
CHUNKS = 3
PAYLOAD = bytes(16)


class NoSums:
    def inspect(self, span: ChunkSpan, payload: Any, wire_dtype: str) -> tuple[float | None, int]:
        return 1.0, 1

    def mean(self, fragment: int, span: ChunkSpan, terms: list[core.Term], wire_dtype: str) -> Any:
        raise AssertionError("nobody asks for it")

    def reset(self) -> None:
        pass


def a_relay() -> core.Relay:
    relay = core.Relay("north", count(1).__next__, NoSums())
    list(relay.connected(0.0))
    terms = Attached(b"token", True, "fp32", chunk_elements=4, fragments=((4 * CHUNKS, 0, 0),))
    list(relay.receive_from_hub(None, terms, None, 0.0))
    return relay


def says(relay: core.Relay, route: bytes, message: Message, payload: Any = None) -> list[Any]:
    return list(relay.receive(route, None, message, payload))


def sends_all(relay: core.Relay, push_id: int, session: bytes = SESSION) -> None:
    for index in range(CHUNKS):
        chunk = Chunk(0, index, session=session, push_id=push_id)
        says(relay, b"bulk", chunk, memoryview(PAYLOAD))


def offers(relay: core.Relay, push_id: int, session: bytes = SESSION, fragment: int = 0) -> None:
    says(relay, b"control", Push(session, push_id, fragment, CHUNKS, "fp32"))


def test_chunks_that_the_hub_has_not_asked_for_are_not_held() -> None:
    relay = a_relay()
    for push_id in range(100):
        session = b"session-%d" % push_id
        offers(relay, push_id, session)
        offers(relay, push_id, session, fragment=1000 + push_id)
        sends_all(relay, push_id, session)
    assert relay.held_bytes == 0
    assert len(relay._offers) == 1


def test_chunk_that_comes_again_is_not_held_again() -> None:
    relay = a_relay()
    offers(relay, 1)
    grant = Grant(1, 0, Standing.NEW, credit=9)
    list(relay.receive_from_hub(Via(b"control"), grant, None, 0.0))
    for _ in range(10):
        sends_all(relay, 1)
        offers(relay, 1)
    assert relay.held_bytes == CHUNKS * len(PAYLOAD)


def test_chunk_of_a_version_goes_to_a_relay_behind_this_one_once() -> None:
    relay = a_relay()
    (answer,) = says(relay, b"deep", Attach("deep", 5))
    says(relay, b"deep-bulk", Attach("deep", 5, answer.message.token))
    version = VersionId("run", 1, 1)
    sent: list[bool] = []
    for worker in (b"a", b"b", b"c"):
        list(relay.receive(b"deep-bulk", Via(worker), Heartbeat(SESSION, 1), None))
        chunk, buffer = Chunk(0, 0, version=version), None if sent else memoryview(PAYLOAD)
        (down,) = relay.receive_from_hub(
            Via(way(b"deep-bulk", worker)), chunk, buffer, 0.0, bulk=True
        )
        assert isinstance(down, core.SendDown)
        sent.append(down.payload is not None)
    assert sent == [True, False, False]
