"""Bytes that ZeroMQ takes for a peer of long ago: nothing is known of it, and the broker goes on."""

from __future__ import annotations

import socket

import pytest

from diloco_broker import Broker, BrokerConfig
from diloco_protocol.clients import Operator
from kit.process_kit import LOCAL, PATIENCE_S, wait_for

# Of ZMTP 1 a frame is its length, a byte of flags, and what is in it; the first one is a name.
NAME = b"\x01\x00"
MESSAGE = b"\x06\x00hello"


HTTP = b"GET / HTTP/1.1\r\nHost: broker:8512\r\nUser-Agent: a scanner of ports or a browser\r\n" * 9


@pytest.mark.parametrize("said", [NAME + MESSAGE, NAME + b"\x06\x01hello" * 50 + MESSAGE, HTTP])
def test_peer_of_zmtp_1_or_of_http_ends_nothing(said: bytes) -> None:
    with Broker(BrokerConfig(**LOCAL)) as broker:
        host, port = broker.address.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as raw:
            raw.sendall(said)
            with Operator(broker.address) as operator:
                wait_for(lambda: operator.ask("status").data["totals"]["malformed"])
