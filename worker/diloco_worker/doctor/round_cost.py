"""What a round costs over a line, and how many inner steps between two rounds make up for it.

A worker sends N parameters in the wire dtype and gets N back in the reply dtype. In a streaming round
a chunk comes back while later ones still go up, so the slower way counts, and one chunk of the other;
where pushes count whole, one way comes behind the other. Besides, a fragment takes three round trips:
the offer and its grant, the last chunk and its acknowledgement, the commit and the release. Waiting for
slower workers is not in it, nor is a line at the broker that others use at the same time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

ROUND_TRIPS = 3


@dataclass(frozen=True)
class Line:
    """Between a worker and its broker, bytes a second and seconds."""

    up: float
    down: float
    round_trip: float


@dataclass(frozen=True)
class Exchange:
    """What a worker exchanges every H steps.

    Attributes:
        parameters: N, that are trained.
        wire_bytes, reply_bytes: of one of them, on the way up and on the way down.
        chunk_elements: of a chunk.
        fragments: P, each of which has a round of its own.
        is_whole: pushes count whole: a quorum, an order, an aggregate, asynchronous mode.
        delay: inner steps that a worker makes while a fragment is on its way.
    """

    parameters: int
    wire_bytes: float
    reply_bytes: float
    chunk_elements: int
    fragments: int = 1
    is_whole: bool = False
    delay: float = 0.0

    @property
    def bytes_up(self) -> int:
        return round(self.parameters * self.wire_bytes)

    @property
    def bytes_down(self) -> int:
        return round(self.parameters * self.reply_bytes)


def fragment_seconds(exchange: Exchange, line: Line) -> float:
    """From the offer of one fragment to its new parameters."""
    up = exchange.bytes_up / exchange.fragments / line.up
    down = exchange.bytes_down / exchange.fragments / line.down
    if exchange.is_whole:
        seconds = up + down
    else:
        elements = min(exchange.chunk_elements, exchange.parameters / exchange.fragments)
        first, last = (
            elements * exchange.wire_bytes / line.up,
            elements * exchange.reply_bytes / line.down,
        )
        seconds = max(up + last, first + down)
    return seconds + ROUND_TRIPS * line.round_trip


def round_seconds(exchange: Exchange, line: Line) -> float:
    """Of all fragments, one after the other."""
    return exchange.fragments * fragment_seconds(exchange, line)


def waits_seconds(exchange: Exchange, line: Line, step_time: float) -> float:
    """What training waits for the line in H steps; `step_time` is seconds of an inner step."""
    of_one = fragment_seconds(exchange, line) - exchange.delay * step_time
    return exchange.fragments * max(0.0, of_one)


def utilisation(exchange: Exchange, line: Line, step_time: float, sync_every: int) -> float:
    """The share of time, 0 to 1, that goes into inner steps."""
    trains = sync_every * step_time
    return trains / (trains + waits_seconds(exchange, line, step_time))


def training_seconds(waits: float, share: float) -> float:
    """How long to train between two waits, so that training is this share of the time."""
    return waits * share / (1 - share)


def sync_every_for(exchange: Exchange, line: Line, step_time: float, share: float) -> int:
    """The least H, at least one step for each fragment, with which this share of time is training."""
    waits = waits_seconds(exchange, line, step_time)
    steps = training_seconds(waits, share) / step_time
    return max(exchange.fragments, math.ceil(steps - 1e-9))
