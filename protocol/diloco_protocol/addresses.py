"""Where a broker is found: its default addresses, what people write for one, what can be one."""

from __future__ import annotations

import ipaddress

DEFAULT_CONTROL_ADDRESS = "tcp://127.0.0.1:8512"
DEFAULT_FEED_ADDRESS = "tcp://127.0.0.1:8513"
# What a socket is bound to where all addresses of its machine are meant, and nobody connects to.
EVERYWHERE = frozenset({"*", "0.0.0.0", "[::]", "[::0]"})


def with_scheme(address: str) -> str:
    """The address with tcp:// in front, where somebody has written HOST:PORT and no more.

    Anything else comes back as it is, so that a complaint about it quotes what was written.
    """
    host, _, port = address.rpartition(":")
    is_host = bool(host) and "/" not in host and (":" not in host or host[0] + host[-1] == "[]")
    is_bare = is_host and (port == "*" or (port.isascii() and port.isdigit()))
    return f"tcp://{address}" if is_bare else address


def several(text: str) -> tuple[str, ...]:
    """The addresses that stand in a text, one or more with commas in between, as `with_scheme` has them.

    The path of a file:// address may have commas, so it stands alone.
    """
    if text.startswith("file://"):
        return (text,)
    return tuple(with_scheme(each.strip()) for each in text.split(","))


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on `host`, a number or a name; no port."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def can_be_reached(address: str) -> bool:
    """False for what libzmq would accept and then never reach: a port out of range, odd characters."""
    port = address.rpartition(":")[2]
    is_port = port.isascii() and port.isdigit() and 1 <= int(port[:6]) <= 65535
    return address.isprintable() and (is_port or not address.startswith("tcp://"))


def control_address(bound: str, feed: str) -> str:
    """Where a broker is steered, by what its feed says that it is bound to and where the feed is.

    A broker that is bound to every address of its machine is sought where its feed is.
    """
    scheme, separator, rest = bound.partition("://")
    host, colon, port = rest.rpartition(":")
    if not (separator and colon) or host not in EVERYWHERE:
        return bound
    feed_host = feed.partition("://")[2].rpartition(":")[0] if feed.startswith("tcp://") else ""
    return f"{scheme}://{feed_host or '127.0.0.1'}:{port}"
