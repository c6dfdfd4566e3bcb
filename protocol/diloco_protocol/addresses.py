"""Addresses of a broker: defaults, short forms that users write, and checks of reachability."""

from __future__ import annotations

import ipaddress
import re

CONTROL_PORT, FEED_PORT = 8512, 8513  # defaults of addresses without a port
DEFAULT_CONTROL_ADDRESS = f"tcp://127.0.0.1:{CONTROL_PORT}"
DEFAULT_FEED_ADDRESS = f"tcp://127.0.0.1:{FEED_PORT}"
# Hosts to bind to all addresses of a machine; clients cannot connect to them.
EVERYWHERE = frozenset({"*", "0.0.0.0", "[::]", "[::0]"})
# A host name, an IPv4 address, an IPv6 address in brackets, or `*`.
_HOST = re.compile(r"\*|\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?", re.ASCII)


def with_scheme(address: str, port: int | None = CONTROL_PORT) -> str:
    """Complete HOST or HOST:PORT to tcp://HOST:PORT; a host alone gets `port`, unless that is None.

    Anything else is returned unchanged, so that an error message quotes what the user wrote.
    """
    bare = address.removeprefix("tcp://")
    is_host = _HOST.fullmatch(bare) and not bare.isdigit()  # a number is more likely a port
    if port is not None and is_host:
        return f"tcp://{bare}:{port}"
    host, _, given = bare.rpartition(":")
    is_named = bool(host) and "/" not in host and (":" not in host or host[0] + host[-1] == "[]")
    is_bare = is_named and (given == "*" or (given.isascii() and given.isdigit()))
    return f"tcp://{bare}" if is_bare else address


def address_or_path(text: str) -> str | None:
    """The control address in an argument that is an address or a path; None for a path.

    Text without a port is a path, unless it is localhost or an IP address.
    """
    if "://" in text:
        return with_scheme(text)
    is_host = is_loopback(text) or _is_ip(text)
    completed = with_scheme(text)
    return completed if "://" in completed and (is_host or ":" in text) else None


def several(text: str) -> tuple[str, ...]:
    """Split a text at commas into control addresses, each completed as by `with_scheme`.

    A file:// address is not split, because its path may contain commas.
    """
    if text.startswith("file://"):
        return (text,)
    return tuple(with_scheme(each.strip()) for each in text.split(","))


def is_loopback(host: str) -> bool:
    """Whether a socket bound to `host`, an IP address or a name, is reachable from this machine only."""
    if host == "localhost":
        return True
    return _is_ip(host) and ipaddress.ip_address(host.strip("[]")).is_loopback


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def can_be_reached(address: str) -> bool:
    """False for addresses that libzmq accepts but never reaches: bad ports, unprintable characters."""
    port = address.rpartition(":")[2]
    is_port = port.isascii() and port.isdigit() and 1 <= int(port[:6]) <= 65535
    return address.isprintable() and (is_port or not address.startswith("tcp://"))


def as_reached(bound: str, at: str) -> str:
    """The address to connect to for a socket that is bound to `bound`, of the broker reached at `at`.

    A socket bound to all addresses of its machine is reached at the host of `at`.
    """
    scheme, separator, rest = bound.partition("://")
    host, colon, port = rest.rpartition(":")
    if not (separator and colon) or host not in EVERYWHERE:
        return bound
    at_host = at.partition("://")[2].rpartition(":")[0] if at.startswith("tcp://") else ""
    return f"{scheme}://{at_host or '127.0.0.1'}:{port}"
