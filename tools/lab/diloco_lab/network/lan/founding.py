"""The table of the first plan of this project, for 1 Gb/s, with every worker's bytes in both directions.

That plan gave the share of time spent computing at H = 500 with steps of 1 s: 99.5% for 150M parameters,
97% for 1B, 82% for 7B. It counted only one worker's upload in bf16. But a broker has one line for all
uploads, and sends the new parameters to each worker over it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from statistics import linear_regression
from typing import NamedTuple

from diloco_lab.bench.sizes import parameters_of
from diloco_lab.driver.tables import NOTHING, Table, percent, seconds, table_of
from diloco_lab.network.lan.grid import FOUNDING_PAIRS, FOUNDING_SIZE, Measurement, Pair

SYNC_EVERY, STEP_S = 500, 1.0  # of the table: inner steps between syncs, and the seconds of each
FAST_LINE = 1e9
PARAMETERS = {FOUNDING_SIZE: parameters_of(FOUNDING_SIZE), "1B": 10**9, "7B": 7 * 10**9}
PLANNED = {FOUNDING_SIZE: 0.995, "1B": 0.97, "7B": 0.82}
GOALS = {"1B": 0.995, "7B": 0.97}
WORKERS = (1, 2, 4, 8)


def utilisation(standstill_s: float, sync_every: int = SYNC_EVERY, step_s: float = STEP_S) -> float:
    """The share of the time spent training, with this standstill for each sync.

    >>> round(utilisation(2.4), 4)
    0.9952
    """
    return sync_every * step_s / (sync_every * step_s + standstill_s)


@dataclass(frozen=True)
class Costs:
    """The costs of one pair of codecs. CPU is in seconds for each parameter, on this kind of core."""

    pair: Pair
    bits_up: float  # of a parameter on the wire, headers included
    bits_down: float
    broker_cpu: float  # for any number of workers
    broker_cpu_of_each: float  # in addition for each worker
    worker_cpu: float
    efficiency: float
    of: Measurement  # from which the efficiency was measured

    def least_seconds(self, parameters: float, workers: int, bits_per_s: float) -> float:
        """The least time of a sync, with a machine for each process and free cores."""
        return max(
            workers * parameters * max(self.bits_up, self.bits_down) / bits_per_s,
            parameters * (self.broker_cpu + workers * self.broker_cpu_of_each),
            parameters * self.worker_cpu,
        )

    def seconds(self, parameters: float, workers: int, bits_per_s: float) -> float:
        return self.least_seconds(parameters, workers, bits_per_s) / self.efficiency


def _on_the_fast_line(of: Sequence[Measurement], kind: str, pair: Pair) -> list[Measurement]:
    return [m for m in of if (m.kind, m.pair, m.broker_bits_per_s) == (kind, pair, FAST_LINE)]


def costs_of(measurements: Sequence[Measurement], pair: Pair) -> Costs | None:
    """From the largest model on the fast line; None without such a measurement of this pair.

    The efficiency is that with the fewest workers, where the processes compete least for cores.
    """
    found = [
        each
        for each in _on_the_fast_line(measurements, "round", pair)
        if each.broker_cpu_s is not None and each.worker_cpu_s is not None
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
    return replace(ideal, efficiency=min(1.0, least / alone.median_s))


def standstill_beside(
    copies_s: float, sync_s: float, sync_every: int = SYNC_EVERY, step_s: float = STEP_S
) -> float:
    """With streaming: the copies, and the part of a sync that does not fit between two.

    >>> standstill_beside(0.5, 300.0), standstill_beside(0.5, 620.0)
    (0.5, 120.5)
    """
    return copies_s + max(0.0, sync_s - sync_every * step_s)


def streaming_standstill(measurements: Sequence[Measurement], pair: Pair) -> float | None:
    """The standstill of a sync with overlapping fragments: seconds for each parameter.

    From the largest model on the fast line; None without such a measurement of this pair.
    """
    found = _on_the_fast_line(measurements, "streaming", pair)
    if not found:
        return None
    largest = max(found, key=lambda each: each.parameters)
    return largest.median_s / largest.parameters


class Cell(NamedTuple):
    """One setting. Without streaming training stands still during the whole sync."""

    model: str
    setting: str
    workers: int
    sync: float  # seconds
    is_measured: bool
    copies: float | None = None  # seconds of them; None without streaming

    @property
    def standstill(self) -> float:
        """Seconds in SYNC_EVERY steps."""
        return self.sync if self.copies is None else standstill_beside(self.copies, self.sync)

    @property
    def share(self) -> float:
        """The share of the time spent training."""
        return utilisation(self.standstill)

    def steps_for(self, goal: float) -> int:
        """The least H with this share of training."""
        of_all = self.sync if self.copies is None else self.copies
        seconds_needed = of_all * goal / (1 - goal)
        if self.copies is not None and seconds_needed < self.sync:
            # Then the sync does not fit between two, and the rest of it is waited for, too.
            seconds_needed = goal * (self.copies + self.sync)
        return math.ceil(seconds_needed / STEP_S)


def _cells(measurements: Sequence[Measurement], all_costs: Sequence[Costs]) -> Iterator[Cell]:
    """By model, setting and number of workers."""
    for (model, parameters), costs in product(PARAMETERS.items(), all_costs):
        name, standstill = "/".join(costs.pair), streaming_standstill(measurements, costs.pair)
        for workers in WORKERS:
            measured = _measured(measurements, parameters, costs.pair, workers)
            computed = costs.seconds(parameters, workers, FAST_LINE)
            sync = computed if measured is None else measured.median_s
            yield Cell(model, name, workers, sync, measured is not None)
            if standstill is not None:
                copies = parameters * standstill
                yield Cell(model, f"{name}, streaming", workers, computed, False, copies)


Row = tuple[str, str]  # model and setting
Cells = dict[Row, dict[int, Cell]]  # by number of workers


def founding_tables(measurements: Sequence[Measurement]) -> Iterator[Table]:
    """Utilisation, the seconds behind it, and the costs that they were computed with."""
    costs = [each for each in (costs_of(measurements, pair) for pair in FOUNDING_PAIRS) if each]
    if not costs:
        return
    by_row: Cells = defaultdict(dict)
    for cell in _cells(measurements, costs):
        by_row[cell.model, cell.setting][cell.workers] = cell

    def table(
        key: str, title: str, show: Callable[[Cell], str], planned: bool, notes: Iterator[str]
    ) -> Table:
        def shown(workers: int, row: Row) -> str:
            cell = by_row[row].get(workers)
            return f"{show(cell)} {'m' if cell.is_measured else 'c'}" if cell else NOTHING

        columns: dict[str, Callable[[Row], str]] = {
            "model": lambda r: r[0],
            "codecs": lambda r: r[1],
        }
        if planned:
            columns["one upload only, as planned"] = lambda row: percent(PLANNED[row[0]])
        columns |= {_people(each): partial(shown, each) for each in WORKERS}
        return table_of(key, title, columns, by_row, labels=2, notes=notes)

    title = "At 1 Gb/s: the share of time that is training"
    yield table("plan", title, lambda of: percent(of.share), True, _goal_sentences(by_row))
    title = "The seconds behind it: how long training stands still for a sync"
    yield table("plan-seconds", title, lambda of: seconds(of.standstill), False, iter(()))
    columns: dict[str, Callable[[Costs], str]] = {
        "codecs": lambda of: "/".join(of.pair),
        "bits up": lambda of: f"{of.bits_up:.3g}",
        "bits down": lambda of: f"{of.bits_down:.3g}",
        "broker CPU, 1B": lambda of: seconds(1e9 * of.broker_cpu),
        "more for each worker": lambda of: seconds(1e9 * of.broker_cpu_of_each),
        "a worker's CPU, 1B": lambda of: seconds(1e9 * of.worker_cpu),
        "efficiency": lambda of: f"{of.efficiency:.2f}",
    }
    check = _check(measurements, costs)
    yield table_of("costs", "What is computed with", columns, costs, notes=check)


def _measured(
    of: Sequence[Measurement], parameters: int, pair: Pair, workers: int
) -> Measurement | None:
    rounds = _on_the_fast_line(of, "round", pair)
    return next((m for m in rounds if (m.parameters, m.workers) == (parameters, workers)), None)


def _goal_sentences(by_row: Cells) -> Iterator[str]:
    """The settings that reach each goal, and those that miss it."""
    for model, goal in GOALS.items():
        reached, missed = [], []
        for (of_model, setting), of_row in by_row.items():
            if of_model != model:
                continue
            if good := [cell.workers for cell in of_row.values() if cell.share >= goal]:
                reached.append(f"{setting} ({_counts(good)})")
            if bad := [cell for cell in of_row.values() if cell.share < goal]:
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
    """Computed seconds beside measured ones, where both are known."""
    told = []
    # Other models with more workers than the one that the costs are from.
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


def _counts(workers: Sequence[int]) -> str:
    if len(workers) == 1:
        return _people(workers[0])
    return f"{', '.join(map(str, workers[:-1]))} and {workers[-1]} workers"


def _people(count: int) -> str:
    return f"{count} worker{'s' if count > 1 else ''}"
