"""The table of the first plan of this project, for 1 Gb/s, with every worker's bytes in both directions.

That plan gave the share of time spent computing at H = 500 with steps of 1 s: 99.5% for 150M parameters,
97% for 1B, 82% for 7B. It counted one worker's upload in bf16 and nothing else. A broker has one line
for the uploads of all, and sends each of them the new parameters over it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import linear_regression
from typing import NamedTuple

from diloco_lab.bench.sizes import parameters_of
from diloco_lab.driver.tables import NOTHING, Table, percent, seconds
from diloco_lab.network.lan import grid
from diloco_lab.network.lan.grid import Measurement

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


MODELS = {grid.FOUNDING_SIZE: parameters_of(grid.FOUNDING_SIZE), "1B": 10**9, "7B": 7 * 10**9}
PLANNED = {grid.FOUNDING_SIZE: 0.995, "1B": 0.97, "7B": 0.82}
GOALS = {"1B": 0.995, "7B": 0.97}
WORKERS = (1, 2, 4, 8)
PAIRS = grid.FOUNDING_PAIRS


class Cell(NamedTuple):
    """Of one setting. Without streaming training stands still for the whole of a sync."""

    model: str
    setting: str
    workers: int
    sync: float  # seconds
    is_measured: bool
    copies: float | None = None  # seconds of them; None without streaming

    @property
    def standstill(self) -> float:
        """Seconds in SYNC_EVERY steps."""
        if self.copies is None:
            return self.sync
        return standstill_beside(self.copies, self.sync)

    @property
    def share(self) -> float:
        """Of the time, that is training."""
        return utilisation(self.standstill)

    def steps_for(self, goal: float) -> int:
        """The least H with which this share of the time is training."""
        of_all = self.sync if self.copies is None else self.copies
        seconds_needed = of_all * goal / (1 - goal)
        if self.copies is not None and seconds_needed < self.sync:
            # The sync does not fit between two then: what is too long is waited for, too.
            seconds_needed = goal * (self.copies + self.sync)
        return math.ceil(seconds_needed / STEP_S)


def cells(measurements: Sequence[Measurement]) -> list[Cell]:
    """All of them that there are numbers for, by model, setting and number of workers."""
    found = []
    for model, parameters in MODELS.items():
        for pair in PAIRS:
            costs = costs_of(measurements, pair)
            if costs is None:
                continue
            name, standstill = "/".join(pair), streaming_standstill(measurements, pair)
            for workers in WORKERS:
                measured = _measured(measurements, parameters, pair, workers)
                computed = costs.seconds(parameters, workers, FAST_LINE)
                sync = computed if measured is None else measured.median_s
                found.append(Cell(model, name, workers, sync, measured is not None))
                if standstill is not None:
                    copies = parameters * standstill
                    of_it = (f"{name}, streaming", workers, computed, False, copies)
                    found.append(Cell(model, *of_it))
    return found


def founding_tables(measurements: Sequence[Measurement]) -> Iterator[Table]:
    """Utilisation, the seconds behind it, what they were computed with."""
    found = cells(measurements)
    if not found:
        return
    head = ("model", "codecs", *(_people(each) for each in WORKERS))
    by_row: dict[tuple[str, str], dict[int, Cell]] = {}
    for cell in found:
        by_row.setdefault((cell.model, cell.setting), {})[cell.workers] = cell
    yield Table(
        "plan",
        "At 1 Gb/s: the share of time that is training",
        ("model", "codecs", "one upload only, as planned", *head[2:]),
        tuple(
            (*row, percent(PLANNED[row[0]]), *(_share(of_row.get(each)) for each in WORKERS))
            for row, of_row in by_row.items()
        ),
        2,
        tuple(_goal_sentences(found)),
    )
    yield Table(
        "plan-seconds",
        "The seconds behind it: how long training stands still for a sync",
        head,
        tuple(
            (*row, *(_standstill(of_row.get(each)) for each in WORKERS))
            for row, of_row in by_row.items()
        ),
        2,
    )
    costs = [each for each in (costs_of(measurements, pair) for pair in PAIRS) if each]
    yield Table(
        "costs",
        "What is computed with",
        (
            "codecs",
            "bits up",
            "bits down",
            "broker CPU, 1B",
            "more for each worker",
            "a worker's CPU, 1B",
            "efficiency",
        ),
        tuple(_costs_row(each) for each in costs),
        1,
        tuple(_check(measurements, costs)),
    )


def _measured(
    measurements: Sequence[Measurement], parameters: int, pair: tuple[str, str], workers: int
) -> Measurement | None:
    for each in measurements:
        if (each.kind, each.parameters, each.pair, each.workers, each.broker_bits_per_s) == (
            "round",
            parameters,
            pair,
            workers,
            FAST_LINE,
        ):
            return each
    return None


def _goal_sentences(found: Sequence[Cell]) -> Iterator[str]:
    """The settings that reach each goal, and those that miss it."""
    for model, goal in GOALS.items():
        by_setting: dict[str, list[Cell]] = {}
        for cell in found:
            if cell.model == model:
                by_setting.setdefault(cell.setting, []).append(cell)
        reached, missed = [], []
        for setting, of_it in by_setting.items():
            if good := [cell.workers for cell in of_it if cell.share >= goal]:
                reached.append(f"{setting} ({_counts(good)})")
            if bad := [cell for cell in of_it if cell.share < goal]:
                steps = sorted({cell.steps_for(goal) for cell in bad})
                ends = f"{steps[0]} on" if len(steps) == 1 else f"{steps[0]} to {steps[-1]} on"
                people = _counts([cell.workers for cell in bad])
                missed.append(f"{setting} ({people}: from H = {ends})")
        yield (
            f"**{model}, at least {percent(goal)}**, so a standstill of at most "
            f"{seconds(SYNC_EVERY * STEP_S * (1 - goal) / goal)}. "
            f"Reached: {'; '.join(reached) or 'by none'}. "
            f"Not reached: {'; '.join(missed) or 'by none'}."
        )


def _check(measurements: Sequence[Measurement], costs: Sequence[Costs]) -> Iterator[str]:
    """Computed seconds beside measured ones, where there are both."""
    told = []
    # Of other models where there are more workers than the one that costs were taken from.
    others = sorted({m.parameters for m in measurements if m.workers > 2}, reverse=True)
    for each in costs:
        sizes = [each.of.parameters, *(size for size in others if size != each.of.parameters)]
        for size, workers in product(sizes, WORKERS):
            found = _measured(measurements, size, each.pair, workers)
            is_told = size == each.of.parameters or workers > 2
            if found is not None and found is not each.of and is_told:
                computed = each.seconds(size, workers, FAST_LINE)
                name = f"{size / 1e6:.0f}M in {'/'.join(each.pair)} with {_people(workers)}"
                told.append(f"{name} {seconds(computed)} for {seconds(found.median_s)} measured")
    if told:
        yield (
            f"Computed beside measured: {'; '.join(told)}. So what is computed for more workers in few "
            "bits is too short here by as much."
        )


def _share(cell: Cell | None) -> str:
    return NOTHING if cell is None else f"{percent(cell.share)} {_mark(cell)}"


def _standstill(cell: Cell | None) -> str:
    return NOTHING if cell is None else f"{seconds(cell.standstill)} {_mark(cell)}"


def _mark(cell: Cell) -> str:
    return "m" if cell.is_measured else "c"


def _costs_row(costs: Costs) -> tuple[str, ...]:
    billion = 1e9
    return (
        "/".join(costs.pair),
        f"{costs.bits_up:.3g}",
        f"{costs.bits_down:.3g}",
        seconds(billion * costs.broker_cpu),
        seconds(billion * costs.broker_cpu_of_each),
        seconds(billion * costs.worker_cpu),
        f"{costs.efficiency:.2f}",
    )


def _counts(workers: Sequence[int]) -> str:
    if len(workers) == 1:
        return _people(workers[0])
    return f"{', '.join(map(str, workers[:-1]))} and {workers[-1]} workers"


def _people(count: int) -> str:
    return f"{count} worker{'s' if count > 1 else ''}"
