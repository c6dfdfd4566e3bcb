"""Why a broker and a client do not come together: what is said, and what is final."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
import zmq

from diloco_protocol.clients.dealer import Dealer
from diloco_protocol.clients.handshake import failure
from diloco_worker.shell.connections import Changes, Connections
from kit.process_kit import wait_for

ENDS = "Whoever answers there ends the connection at once"


@pytest.fixture
def closing() -> Iterator[str]:
    """The address of one that takes each connection and closes it, as a tunnel into nowhere does."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    server.accept()[0].close()
                except OSError:
                    return

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join(10)


@pytest.mark.parametrize("has_keys", [False, True])
def test_end_without_a_reason_is_not_taken_for_a_missing_key(has_keys: bool) -> None:
    said = failure(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, has_keys=has_keys)
    assert said is not None and said.startswith(ENDS)
    known = failure(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, has_keys=has_keys)
    assert known is not None and known.startswith("The broker asks for ")
    assert failure(zmq.EVENT_HANDSHAKE_SUCCEEDED, has_keys=has_keys) is None


def test_operator_goes_on_asking_who_ends_each_connection(closing: str) -> None:
    dealer = Dealer(closing)
    try:
        for _ in range(4):  # it may be there yet: that is no refusal, however often
            assert dealer.receive(wait_until_told(dealer)) is None
    finally:
        dealer.close()
    assert dealer.failure is not None and dealer.failure.startswith(ENDS)


def wait_until_told(dealer: Dealer) -> float:
    """When to stop listening: at once, as soon as a further handshake has failed."""
    assert dealer._monitor.socket.poll(10_000)
    return time.monotonic() + 0.02


def test_worker_is_not_refused_by_who_ends_each_connection(closing: str) -> None:
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
