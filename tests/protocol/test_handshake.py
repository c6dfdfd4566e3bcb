"""Why a broker and a client do not come together: what is said, and what is final."""

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing as closing_at_end

import pytest
import zmq

from diloco_protocol import UsageError, messages
from diloco_protocol.clients.dealer import Dealer
from diloco_protocol.clients.greeting import asks_for_keys
from diloco_protocol.clients.handshake import failure
from diloco_worker.transport.connections import Changes, Connections
from kit.other_servers import other_server
from kit.process_kit import wait_for

ENDS = "The peer closes the connection at once"


@pytest.fixture
def closing() -> Iterator[str]:
    """The address of one that takes each connection and closes it, as a tunnel into nowhere does."""
    with other_server(None) as address:
        yield f"tcp://{address}"


@pytest.mark.parametrize("has_keys", [False, True])
def test_connection_closed_without_a_reason_is_not_reported_as_a_missing_key(
    has_keys: bool, closing: str
) -> None:
    said = failure(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, closing, has_keys=has_keys)
    assert said is not None and said.text.startswith(ENDS) and not said.is_final
    known = failure(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, closing, has_keys=has_keys)
    wanted = "The broker uses no keys" if has_keys else "The broker requires a key"
    assert known is not None and known.text.startswith(wanted) and known.is_final
    assert failure(zmq.EVENT_HANDSHAKE_SUCCEEDED, closing, has_keys=has_keys) is None


@pytest.mark.parametrize("has_keys", [False, True])
@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("way", ["tcp", "ipc"])
def test_broker_is_asked_why_it_ended_a_handshake(asks: bool, has_keys: bool, way: str) -> None:
    """Then ZeroMQ here has not been told whether it asks for keys."""
    folder = tempfile.mkdtemp()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        if asks:
            _, secret = zmq.curve_keypair()
            router.setsockopt(zmq.CURVE_SERVER, 1)
            router.setsockopt(zmq.CURVE_SECRETKEY, secret)
        router.bind("tcp://127.0.0.1:*" if way == "tcp" else f"ipc://{folder}/s")
        address = router.get_string(zmq.LAST_ENDPOINT)
        assert asks_for_keys(address, 10.0) is asks
        said = failure(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, address, has_keys=has_keys)
        assert said is not None
        if asks == has_keys:  # it may be another key
            assert said.text.startswith(ENDS) and not said.is_final
        else:
            wanted = "The broker uses no keys" if has_keys else "The broker requires a key"
            assert said.text.startswith(wanted) and said.is_final
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    "says",
    [b"", b"HTTP/1.1 400 Bad Request\r\n" + b" " * 64, b"\xff" * 64],
    ids=["nothing", "HTTP", "noise"],
)
def test_probe_for_keys_gives_up_soon_at_other_servers(says: bytes) -> None:
    with other_server(says) as server:
        assert asks_for_keys(f"tcp://{server}", 0.2) is None
    for address in (
        f"tcp://{server}",
        "",
        "tcp://",
        "tcp://[::1",
        "ipc:///no/such/file",
        "tcp://127.0.0.1:x",
    ):
        assert asks_for_keys(address, 0.2) is None


def test_operator_keeps_trying_a_peer_that_closes_each_connection(closing: str) -> None:
    dealer = Dealer(closing)
    try:
        for _ in range(4):  # it may be there yet: that is not a refusal, however often
            assert dealer._monitor.socket.poll(10_000), "a further handshake has failed"
            assert dealer.receive(time.monotonic() + 0.02) is None
    finally:
        dealer.close()
    assert dealer.failure is not None and dealer.failure.startswith(ENDS)


def test_peer_that_closes_each_connection_is_not_a_final_refusal(closing: str) -> None:
    with zmq.Context() as context:
        connections, found = Connections(context, closing), Changes()

        def is_refused() -> bool:
            nonlocal found
            found = connections.changes()
            return found.refused is not None

        try:
            wait_for(is_refused)
        finally:
            connections.close()
    assert found.refused is not None and found.refused.startswith(ENDS)
    assert not found.is_final


@pytest.mark.timeout(30)
def test_request_does_not_wait_for_a_connection_that_was_refused_for_good() -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as feed:
        port = feed.bind_to_random_port("tcp://127.0.0.1")
        with closing_at_end(Dealer(f"tcp://127.0.0.1:{port}")) as dealer:
            with pytest.raises(UsageError):
                dealer.receive(time.monotonic() + 20)
            dealer.send(messages.Control("status", 1))
