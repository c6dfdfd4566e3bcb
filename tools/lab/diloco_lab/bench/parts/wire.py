"""The limit of the wire, and the utilisation of a slow link."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from diloco_lab.bench.link import SlowProxy
from diloco_lab.bench.process_pool import ProcessPool, RawSample
from diloco_lab.bench.report.figures import Figure, figure

LIMITS, WAN = "limits", "wide-area link"
# The link.
BITS_PER_S = 1e9
ROUND_TRIP_S = 0.1


def of_all(samples: Sequence[RawSample]) -> list[Figure]:
    """The limit over the whole run."""
    row = partial(figure, LIMITS, "raw TCP, over the whole run")
    if not samples:
        return []
    return [
        row("speed", [each.speed for each in samples], "GB/s"),
        row("send", [each.send_cpu for each in samples], "s/GB"),
        row("receive", [each.receive_cpu for each in samples], "s/GB"),
    ]


def wan(pool: ProcessPool, *, size: str = "50M", repeats: int = 3) -> list[Figure]:
    """A round through a link of 1 Gb/s with a round trip of 100 ms.

    The share of it that the credits allow, for one worker with the real hook. The link itself counts:
    all bytes from the first piece of a chunk to the last, against what it could have carried meanwhile,
    in either direction.
    """
    (trainer,) = pool.roles("trainer")
    up, down, seconds = [], [], []
    with (
        pool.broker(workers=1, sync_every=1) as broker,
        SlowProxy(broker.address, BITS_PER_S / 8, ROUND_TRIP_S / 2) as link,
    ):
        trainer.ask("build", size=size)
        trainer.ask("join", address=link.address)
        for _ in range(repeats):
            link.forget()
            found = trainer.ask("round")
            seconds.append(found["ended"] - found["began"])
            up.append(link.up.share)
            down.append(link.down.share)
        trainer.ask("leave")
    network = f"{BITS_PER_S / 1e9:g} Gb/s, {1e3 * ROUND_TRIP_S:g} ms"
    of_it = partial(figure, WAN, f"{size}, 1 worker, {network}")
    return [
        of_it("round", seconds, "s"),
        of_it("up", up, "%", target="link"),
        of_it("down", down, "%", target="link"),
    ]
