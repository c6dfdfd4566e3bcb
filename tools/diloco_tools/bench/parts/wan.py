"""A round through a link of 1 Gb/s with a round trip of 100 ms: what share the credits let through.

One worker with the real hook. The link itself counts: all bytes from the first piece of a chunk to
the last, against what it could have carried meanwhile, in either direction. Raw TCP goes through a
link of its own.
"""

from __future__ import annotations

from functools import partial

from diloco_tools.bench.process_pool import ProcessPool
from diloco_tools.bench.raw_tcp import Ends
from diloco_tools.bench.report.figures import Figure, figure
from diloco_tools.bench.role_process import join_trainers
from diloco_tools.bench.roles.raw import CALL_BYTES
from diloco_tools.tcp_proxy import HOST

PART = "wide-area link"
BITS_PER_S = 1e9
ROUND_TRIP_S = 0.1
RAW_S = 1.0  # that a measurement of raw TCP takes at the link's speed


def measure(pool: ProcessPool, *, size: str, repeats: int) -> list[Figure]:
    """The shares of raw TCP, up and down."""
    link, trainers = pool.role("link"), pool.trainers(1)
    shape = {"bits_per_s": BITS_PER_S, "delay_s": ROUND_TRIP_S / 2}
    ends = Ends(pool.role("raw", "far-sender"), pool.role("raw", "far-receiver"))
    receiver = f"tcp://{HOST}:{ends.receiver.ask('port')['port']}"
    raw_at = link.ask("open", target=receiver, **shape)["port"]
    ends.connect(through=raw_at)
    count = int(RAW_S * BITS_PER_S / 8 / CALL_BYTES)
    raw, up, down, seconds = [], [], [], []
    with pool.broker("--workers", "1", "--sync-every", "1") as broker:
        trainers[0].ask("build", size=size)
        at = link.ask("open", target=broker.address, **shape)["port"]
        join_trainers(trainers, f"tcp://{HOST}:{at}")
        for _ in range(repeats):
            link.ask("forget", port=raw_at)
            ends.move(count)
            raw.append(link.ask("shares", port=raw_at)["up"])
            link.ask("forget", port=at)
            found = trainers[0].ask("round")
            seconds.append(found["ended"] - found["began"])
            shares = link.ask("shares", port=at)
            up.append(shares["up"])
            down.append(shares["down"])
        trainers[0].ask("leave")
    pool.dismiss("link", "far-")
    network = f"{BITS_PER_S / 1e9:g} Gb/s, {1e3 * ROUND_TRIP_S:g} ms"
    of_it = partial(figure, PART, f"{size}, 1 worker, {network}")
    return [
        of_it("round", seconds, "s"),
        of_it("raw TCP", raw, "%"),
        of_it("up", up, "%", target="link"),
        of_it("down", down, "%", target="link"),
    ]
