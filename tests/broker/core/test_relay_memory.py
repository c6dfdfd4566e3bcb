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
    Heartbeat,
    Message,
    Via,
)
from diloco_protocol.relays import way
from diloco_protocol.version import VersionId

SESSION = b"session"
CHUNKS = 3
PAYLOAD = bytes(16)


class NoSums:
    def look(self, span: ChunkSpan, payload: Any, wire_dtype: str) -> tuple[float | None, int]:
        return 1.0, 1

    def mean(self, fragment: int, span: ChunkSpan, terms: list[core.Term], wire_dtype: str) -> Any:
        raise AssertionError("nobody asks for it")

    def forget(self) -> None:
        pass


def a_relay() -> core.Relay:
    relay = core.Relay("north", count(1).__next__, NoSums())
    list(relay.connected(0.0))
    terms = Attached(b"token", True, "fp32", chunk_elements=4, fragments=((4 * CHUNKS, 0, 0),))
    list(relay.hears_hub(None, terms, None, 0.0))
    return relay


def says(relay: core.Relay, route: bytes, message: Message, payload: Any = None) -> list[Any]:
    return list(relay.hears(route, None, message, payload))


def test_chunk_of_a_version_goes_to_a_relay_behind_this_one_once() -> None:
    relay = a_relay()
    (answer,) = says(relay, b"deep", Attach("deep", 5))
    says(relay, b"deep-bulk", Attach("deep", 5, answer.message.token))
    version = VersionId("run", 1, 1)
    sent: list[bool] = []
    for worker in (b"a", b"b", b"c"):
        list(relay.hears(b"deep-bulk", Via(worker), Heartbeat(SESSION, 1), None))
        chunk, buffer = Chunk(0, 0, version=version), None if sent else memoryview(PAYLOAD)
        (down,) = relay.hears_hub(Via(way(b"deep-bulk", worker)), chunk, buffer, 0.0, bulk=True)
        assert isinstance(down, core.Down)
        sent.append(down.payload is not None)
    assert sent == [True, False, False]
