"""What anybody who reaches the port may send, over real sockets: it costs little, and nothing stays."""

import contextlib
import gc
import socket
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco_broker import Broker, BrokerConfig
from diloco_broker.shell.connection_watch import MOST_UNAUTHENTICATED
from diloco_broker.shell.process_memory import give_back_freed_memory, rss_bytes
from diloco_protocol.clients.operator import Operator
from diloco_protocol.description import describe
from diloco_tools.monitor.feed.listener import FeedSubscriber
from diloco_worker import DiLoCoClient, manifest_of
from kit.process_kit import wait_for
from kit.raw_worker import RawWorker, one_tensor

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux counts the bytes of a connection"
)
MORE, LONG = 1, 2
READY = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
EMPTY = bytes([MORE, 0])  # a frame of ZMTP 3 (RFC 23)
MIB = bytes([MORE | LONG]) + struct.pack(">Q", 1 << 20) + bytes(1 << 20)
PATIENCE_S = 30.0
# A message of 3 million empty frames takes 2.7 s of a loop that receives them.
CPU_S = 0.5
GROWTH_BYTES = 64 << 20


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    config = BrokerConfig(
        workers=1,
        max_workers=1,
        bind="tcp://127.0.0.1:*",
        feed="tcp://127.0.0.1:*",
        save_dir=str(tmp_path),
    )
    with Broker(config) as running:
        yield running


def connected(address: str) -> socket.socket:
    """A connection that says nothing yet."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


def greeted(address: str) -> socket.socket:
    """A connection to a ROUTER that may send frames now."""
    made = connected(address)
    made.sendall(
        b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
    )
    made.recv(64, socket.MSG_WAITALL)
    made.sendall(bytes([4, len(READY)]) + READY)
    return made


def sends_until_ended(made: socket.socket, block: bytes) -> None:
    """Send this again and again, until the other side ends the connection."""
    until = time.monotonic() + PATIENCE_S
    with contextlib.suppress(OSError):
        while time.monotonic() < until:
            made.sendall(block)
    assert time.monotonic() < until, "it was never ended"


def is_ended(made: socket.socket) -> bool:
    made.settimeout(PATIENCE_S)
    try:
        while made.recv(4096):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def status(broker: Broker) -> dict[str, Any]:
    with Operator(broker.address, timeout=PATIENCE_S) as operator:
        return dict(operator.ask("status").data)


def cpu_s(broker: Broker) -> float:
    """Seconds of the loop's own work until now."""
    return float(status(broker)["loop"]["cpu_s"])


def held_bytes() -> int:
    """Memory of this process, without what its allocator keeps for later."""
    gc.collect()
    give_back_freed_memory(sys.maxsize)
    return rss_bytes()


def nothing_stays(before: int) -> None:
    """Less than `GROWTH_BYTES` more than that; waits for those that still clean up."""
    wait_for(lambda: held_bytes() - before < GROWTH_BYTES)


def test_message_of_many_empty_frames_is_dropped_and_its_sender_with_it(broker: Broker) -> None:
    with contextlib.closing(greeted(broker.address)) as made:
        # With nothing left to receive the broker is sure who sends the next message.
        status(broker)
        before = cpu_s(broker)
        made.sendall(EMPTY * 30_000 + bytes(2))
        assert is_ended(made)
    assert cpu_s(broker) - before < CPU_S


def test_large_frames_of_unauthenticated_peers_take_no_memory(broker: Broker) -> None:
    memory = held_bytes()
    with contextlib.ExitStack() as stack:
        crowd = [
            stack.enter_context(contextlib.closing(greeted(broker.address))) for _ in range(60)
        ]
        for made, announced in zip(crowd, [7 << 20, 4 << 20] * 30, strict=True):
            with contextlib.suppress(OSError):  # nearly all of it
                made.sendall(bytes([LONG]) + struct.pack(">Q", announced) + bytes(3 << 20))
        assert all(is_ended(made) for made in crowd)
    nothing_stays(memory)


def test_crowd_that_says_nothing_leaves_room_for_workers_and_displays(broker: Broker) -> None:
    with contextlib.ExitStack() as stack, RawWorker(broker.address, "w0") as worker:
        worker.join(one_tensor(8))
        for address in (broker.address, broker.feed_address):
            crowd = [
                stack.enter_context(contextlib.closing(connected(address)))
                for _ in range(MOST_UNAUTHENTICATED + 2 + 40)
            ]
            # A greeting comes to each; the oldest are ended.
            assert all(is_ended(made) for made in crowd[:20])
        worker.send("heartbeat", session=worker.session, step=1)
        worker.receive("notice")
        with FeedSubscriber(broker.feed_address) as listener:
            assert listener.receive(PATIENCE_S) is not None


def test_subscriptions_without_end_are_cut_off(broker: Broker) -> None:
    with contextlib.closing(greeted(broker.feed_address)) as made:
        subscription = b"\x01" + b"x" * 20
        sends_until_ended(made, bytes([0, len(subscription)]) + subscription)


@pytest.mark.slow
def test_long_description_passes_the_limits(broker: Broker) -> None:
    model = torch.nn.ParameterDict(
        {f"{number:05}_{'of_a_long_name' * 6}": torch.zeros(1) for number in range(12_000)}
    )
    with DiLoCoClient(broker.address, worker_id="w", timeout=PATIENCE_S) as client:
        client.join(model)
        assert len(describe(manifest_of(model)).packed) > 1 << 20
        assert client.status()["totals"]["ended_connections"] == 0


@pytest.mark.parametrize("block", [EMPTY * (1 << 15), MIB], ids=["empty", "MiB"])
def test_message_that_never_ends_is_cut_off(broker: Broker, block: bytes) -> None:
    before, memory = cpu_s(broker), held_bytes()
    with contextlib.closing(greeted(broker.address)) as made:
        sends_until_ended(made, block)
    assert cpu_s(broker) - before < CPU_S
    nothing_stays(memory)


# Of ZMTP 1 a frame is its length, a byte of flags, and what is in it; the first one is a name.
NAME, MESSAGE = b"\x01\x00", b"\x06\x00hello"
HTTP = b"GET / HTTP/1.1\r\nHost: broker:8512\r\nUser-Agent: a scanner of ports or a browser\r\n" * 9


@pytest.mark.parametrize("said", [NAME + MESSAGE, NAME + b"\x06\x01hello" * 50 + MESSAGE, HTTP])
def test_peer_of_zmtp_1_or_of_http_ends_nothing(broker: Broker, said: bytes) -> None:
    """ZeroMQ takes such bytes for a peer of long ago, of which nothing is known."""
    with contextlib.closing(connected(broker.address)) as raw:
        raw.sendall(said)
        wait_for(lambda: status(broker)["totals"]["malformed"])
