"""Measures round trips and bandwidth, over a DEALER to the broker's ROUTER (CURVE where keys are used).

Probes carry a buffer up or down. The window of probes in flight starts small and grows by one with each
answer, so that a slow link is not congested for long.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from diloco_protocol.clients.dealer import Dealer
from diloco_protocol.errors import Refused, Unreachable
from diloco_protocol.messages import LONGEST_PROBE, Error, Message, Probe

TRIPS = 20
# In each direction: probes, seconds to send them, and seconds to wait for the last answer.
PROBES = 512
SENDS_FOR_S = 1.0
ENDS_AFTER_S = 15.0
# In flight at most 6 MiB: a broker closes unauthenticated connections with more than 8 MiB unread.
FIRST_WINDOW, WINDOW = 2, 128
# The measured answers are split into parts; the least answers in each.
PARTS, PART_IS_AT_LEAST = 5, 4
# Share of what the last window allows in a round trip. Above it the window may have been the limit, not
# the link: it grew during the measurement, so its mean is about half of its last size.
BOUND_BY_WINDOW = 0.45


@dataclass(frozen=True)
class RoundTrips:
    """Seconds."""

    median: float
    worst: float
    count: int


@dataclass(frozen=True)
class Rate:
    """Bytes a second; `is_at_least`: the window may have been the limit, so the link may be faster."""

    bytes_per_s: float
    is_at_least: bool


def round_trips(dealer: Dealer, within_s: float) -> RoundTrips:
    """Raises Refused and Unreachable."""
    took = []
    for number in range(TRIPS):
        began = time.monotonic()
        dealer.send(Probe(number))
        _answer(dealer, began + within_s)
        took.append(time.monotonic() - began)
    return RoundTrips(statistics.median(took), max(took), TRIPS)


def rate_up(dealer: Dealer, trip: RoundTrips) -> Rate:
    """How fast chunks would go to the broker. Raises Refused and Unreachable."""
    filling = os.urandom(LONGEST_PROBE)  # incompressible
    return _rate(dealer, lambda number: (Probe(number), filling), trip)


def rate_down(dealer: Dealer, trip: RoundTrips) -> Rate:
    """How fast chunks would come from the broker. Raises Refused and Unreachable."""
    return _rate(dealer, lambda number: (Probe(number, LONGEST_PROBE), None), trip)


def _rate(dealer: Dealer, make: Callable[[int], tuple[Probe, Any]], trip: RoundTrips) -> Rate:
    sent, window, began = 0, FIRST_WINDOW, time.monotonic()
    times: list[float] = []
    while True:
        is_over = sent == PROBES or time.monotonic() - began > SENDS_FOR_S
        while not is_over and sent - len(times) < window and sent < PROBES:
            dealer.send(*make(sent))
            sent += 1
        if sent == len(times):
            break
        try:
            _answer(dealer, began + ENDS_AFTER_S)
        except Unreachable:
            if not times:
                raise
            break  # the answers so far tell how slow the link is
        times.append(time.monotonic())
        window = min(WINDOW, window + 1)
    bytes_per_s = LONGEST_PROBE * answers_a_second([began, *times])
    most = window * LONGEST_PROBE / trip.median
    return Rate(bytes_per_s, bytes_per_s > BOUND_BY_WINDOW * most)


def answers_a_second(times: Sequence[float]) -> float:
    """The median rate over parts of the last two thirds, so that one pause does not count.

    `times`: when the first probe was sent, and when each answer came.
    """
    steady = times[len(times) // 3 :] if len(times) > 2 else times
    size = max(1, (len(steady) - 1) // PARTS)
    ends = steady[::size] if size >= PART_IS_AT_LEAST else (steady[0], steady[-1])
    each = size if size >= PART_IS_AT_LEAST else len(steady) - 1
    return each / max(statistics.median(b - a for a, b in itertools.pairwise(ends)), 1e-9)


def _answer(dealer: Dealer, until: float) -> Message:
    """The next probe that comes back."""
    while (found := dealer.receive(until)) is not None:
        message, _ = found
        if isinstance(message, Error):
            raise Refused(message.code, message.text, retry=message.retry)
        if isinstance(message, Probe):
            return message
    raise Unreachable("The broker did not answer a probe in time.")
