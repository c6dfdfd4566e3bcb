"""The role "line-probe": how long it is there and back over a line, without anything of ours in it."""

from __future__ import annotations

import socket
import time

PATIENCE_S = 10.0


class LineProbe:
    """Makes connections to where a broker listens: each takes one round trip of the line."""

    def __init__(self, _: object) -> None:
        pass

    def round_trips(self, address: str, count: int) -> dict[str, list[float]]:
        """Seconds that each of `count` connections to tcp://HOST:PORT took."""
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        found = []
        for _ in range(count):
            began = time.monotonic()
            socket.create_connection((host, int(port)), PATIENCE_S).close()
            found.append(time.monotonic() - began)
        return {"seconds": found}
