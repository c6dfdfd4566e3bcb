"""Extrapolates measurements to larger models, more workers and longer steps. Pure.

A sync takes about as long as the slowest of what goes on in it at the same time: the bytes on the
broker's line, the work of the broker and that of a worker, each on one core. *Efficiency* is how close
to that a sync came that was measured. What cannot be measured here is computed as that time over the
efficiency of the same codecs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import linear_regression

from diloco_lab.network.lan.records import Measurement

SYNC_EVERY, STEP_S = 500, 1.0  # of the table: inner steps between syncs, and the seconds of each
FAST_LINE = 1e9
Pair = tuple[str, str]


def utilisation(standstill_s: float, sync_every: int = SYNC_EVERY, step_s: float = STEP_S) -> float:
    """The share of the time that training trains, where it stands still so long for each sync.

    >>> round(utilisation(2.4), 4)
    0.9952
    """
    return sync_every * step_s / (sync_every * step_s + standstill_s)


@dataclass(frozen=True)
class Number:
    """Seconds, and whether they were measured or computed."""

    seconds: float
    is_measured: bool


@dataclass(frozen=True)
class Costs:
    """Of one pair of codecs. CPU is in seconds for each parameter, on this kind of core."""

    pair: Pair
    bits_up: float  # of a parameter on the wire, headers included
    bits_down: float
    broker_cpu: float  # whatever the number of workers
    broker_cpu_of_each: float  # more for each worker
    worker_cpu: float
    efficiency: float
    of: Measurement  # what the efficiency was measured on

    def least_seconds(self, parameters: float, workers: int, bits_per_s: float) -> float:
        """What a sync takes at least, with a machine for each process and no core to wait for."""
        return max(
            workers * parameters * max(self.bits_up, self.bits_down) / bits_per_s,
            parameters * (self.broker_cpu + workers * self.broker_cpu_of_each),
            parameters * self.worker_cpu,
        )

    def seconds(self, parameters: float, workers: int, bits_per_s: float) -> float:
        return self.least_seconds(parameters, workers, bits_per_s) / self.efficiency


def costs_of(measurements: Sequence[Measurement], pair: Pair) -> Costs | None:
    """From the largest model on the fast line; None where nothing of this pair was measured there.

    The efficiency is that with the fewest workers: there the processes wait for a core the least.
    """
    found = [
        each
        for each in measurements
        if (each.kind, each.pair, each.broker_bits_per_s) == ("round", pair, FAST_LINE)
        and each.broker_cpu_s is not None
        and each.worker_cpu_s is not None
    ]
    if not found:
        return None
    largest = max(each.parameters for each in found)
    found = sorted(
        (each for each in found if each.parameters == largest), key=lambda each: each.workers
    )
    alone = found[0]
    broker = [(each.broker_cpu_s or 0.0) / largest for each in found]
    if len(found) > 1:
        slope, fixed = linear_regression([each.workers for each in found], broker)
    else:
        slope, fixed = broker[0] / alone.workers, 0.0
    ideal = Costs(
        pair,
        8 * alone.bytes_up / largest,
        8 * alone.bytes_down / largest,
        max(0.0, fixed),
        max(0.0, slope),
        (alone.worker_cpu_s or 0.0) / largest,
        1.0,
        alone,
    )
    least = ideal.least_seconds(largest, alone.workers, FAST_LINE)
    return Costs(**(vars(ideal) | {"efficiency": min(1.0, least / alone.median_s)}))


def on_a_slower_line(faster: Measurement, bits_per_s: float) -> float:
    """Seconds of the same sync on a slower line, by the share of the line it came to on a faster one."""
    return faster.median_s * faster.broker_bits_per_s / bits_per_s


def standstill_beside(
    copies_s: float, sync_s: float, sync_every: int = SYNC_EVERY, step_s: float = STEP_S
) -> float:
    """With streaming: the copies, and what of a sync does not fit between two.

    >>> standstill_beside(0.5, 300.0), standstill_beside(0.5, 620.0)
    (0.5, 120.5)
    """
    return copies_s + max(0.0, sync_s - sync_every * step_s)


def streaming_standstill(measurements: Sequence[Measurement], pair: Pair) -> float | None:
    """What fragments that overlap with training leave of a sync: seconds for each parameter.

    From the largest model on the fast line; None where nothing of this pair was measured there.
    """
    found = [
        each
        for each in measurements
        if (each.kind, each.pair, each.broker_bits_per_s) == ("streaming", pair, FAST_LINE)
    ]
    if not found:
        return None
    largest = max(found, key=lambda each: each.parameters)
    return largest.median_s / largest.parameters
