"""Where a broker is found: the addresses it has by default, and which ones can be one at all."""

from __future__ import annotations

DEFAULT_CONTROL_ADDRESS = "tcp://127.0.0.1:8512"
DEFAULT_FEED_ADDRESS = "tcp://127.0.0.1:8513"


def can_be_reached(address: str) -> bool:
    """False for what libzmq would accept and then never reach: a port out of range, odd characters."""
    port = address.rpartition(":")[2]
    is_port = port.isascii() and port.isdigit() and 1 <= int(port[:6]) <= 65535
    return address.isprintable() and (is_port or not address.startswith("tcp://"))
