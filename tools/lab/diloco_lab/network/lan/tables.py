"""What was measured, and what follows from it, as tables for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median

from diloco_lab.bench.sizes import parameters_of, size_of
from diloco_lab.driver.tables import (
    NOTHING,
    Table,
    blocks_of,
    percent,
    rate_of,
    seconds,
    where_measured,
)
from diloco_lab.network.lan import grid
from diloco_lab.network.lan.founding import Number, founding_tables, on_a_slower_line, utilisation
from diloco_lab.network.lan.grid import LanFile, Measurement

# Tables that a page may ask for.
KEYS = (
    *("sync", "training", "heartbeats", "bytes"),
    *("streaming", "mixed"),
    *("plan", "plan-seconds", "costs"),
)
LINES = tuple(grid.LINES.values())
Row = tuple[int, tuple[str, str]]  # parameters, codecs


def tables(measurements: Sequence[Measurement]) -> list[Table]:
    """None of them is empty."""
    found = [
        *_of_rounds(_rounds(measurements)),
        *_streaming([each for each in measurements if each.kind == "streaming"]),
        *_mixed([each for each in measurements if each.kind == "mixed"]),
        *founding_tables(measurements),
    ]
    return [each for each in found if each.rows]


def blocks(found: LanFile) -> dict[str, str]:
    """For the page."""
    all_of_it = found.measurements
    times, loads = [each.at for each in all_of_it], [each.load for each in all_of_it]
    where = where_measured(found.machine, times, loads, "measurement")
    return blocks_of(KEYS, tables(all_of_it), where)


def _rounds(measurements: Sequence[Measurement]) -> dict[Row, dict[float, Measurement]]:
    """Of the grid: by model and codecs, by line."""
    found: dict[Row, dict[float, Measurement]] = {}
    for each in measurements:
        of_founding = each.parameters == parameters_of(grid.FOUNDING_SIZE)
        if each.kind == "round" and each.workers == grid.WORKERS and not of_founding:
            by_line = found.setdefault((each.parameters, each.pair), {})
            by_line[each.broker_bits_per_s] = each
    return found


def _of_rounds(rounds: dict[Row, dict[float, Measurement]]) -> Iterator[Table]:
    """A row for each model and codecs, a column for each line."""

    def of_lines(row: Row, cell: Callable[[Row, float], str]) -> tuple[str, ...]:
        return (*_labels(row), *(cell(row, line) for line in LINES))

    def number(row: Row, line: float) -> Number | None:
        if found := rounds[row].get(line):
            return Number(found.median_s, True)
        faster = [each for at, each in rounds[row].items() if at > line]
        if not faster:
            return None
        nearest = min(faster, key=lambda each: each.broker_bits_per_s)
        return Number(on_a_slower_line(nearest, line), False)

    def time_and_share(row: Row, line: float) -> str:
        if found := rounds[row].get(line):
            return f"{seconds(found.median_s)}, {found.line_seconds / found.median_s:.0%}"
        return NOTHING if (of := number(row, line)) is None else f"{seconds(of.seconds)} c"

    def share_of_training(row: Row, line: float) -> str:
        if (of := number(row, line)) is None:
            return NOTHING
        return percent(utilisation(of.seconds)) + ("" if of.is_measured else " c")

    def heartbeat(row: Row, line: float) -> str:
        found = rounds[row].get(line)
        p99 = found.heartbeat_p99_s if found else None
        return NOTHING if p99 is None else f"{1e3 * p99:.0f} ms"

    lines = tuple(map(rate_of, LINES))
    yield Table(
        "sync",
        "A sync, and how much of the line it used",
        ("model", "codecs", *lines),
        tuple(of_lines(row, time_and_share) for row in rounds),
        2,
        tuple(_left_out(rounds)),
    )
    yield Table(
        "training",
        "The share of time that is training",
        ("model", "codecs", *lines),
        tuple(of_lines(row, share_of_training) for row in rounds),
        2,
    )
    yield Table(
        "heartbeats",
        "Heartbeats beside a sync, p99",
        ("model", "codecs", *lines),
        tuple(of_lines(row, heartbeat) for row in rounds),
        2,
    )
    yield Table(
        "bytes",
        "Bytes and work of a sync",
        ("model", "codecs", "up", "down", "broker CPU", "a worker's CPU"),
        tuple(
            (
                *_labels(row),
                f"{found.bytes_up / 1e6:.3g} MB",
                f"{found.bytes_down / 1e6:.3g} MB",
                seconds(found.broker_cpu_s or 0.0),
                seconds(found.worker_cpu_s or 0.0),
            )
            for row, by_line in rounds.items()
            for found in [by_line[max(by_line)]]
        ),
        2,
    )


def _left_out(rounds: dict[Row, dict[float, Measurement]]) -> Iterator[str]:
    missing = [
        f"{size_of(row[0])} {'/'.join(row[1])} at {rate_of(line)}"
        for row, by_line in rounds.items()
        for line in LINES
        if line not in by_line
    ]
    if missing:
        yield (
            f"Not measured, since one sync takes more than {grid.MOST_S:g} s: {', '.join(missing)}. "
            "These are computed (c) from the next faster line, which alone holds those syncs up."
        )


def _streaming(found: Sequence[Measurement]) -> Iterator[Table]:
    yield Table(
        "streaming",
        "Streaming: what of a sync is hidden behind training",
        (
            "model",
            "codecs",
            "line",
            "sync, nothing hidden",
            "steps between two",
            "training stands still",
            "to copy the model twice",
            "hidden",
            "merged behind the slot",
        ),
        tuple(
            (
                *_labels((each.parameters, each.pair)),
                rate_of(each.broker_bits_per_s),
                seconds(each.sync_seconds or 0.0),
                f"{each.sync_every} of {seconds(each.step_s or 0.0)}",
                seconds(each.median_s),
                NOTHING if each.copy_s is None else seconds(2 * each.copy_s),
                percent(each.hidden or 0.0),
                f"{each.delay_steps} steps",
            )
            for each in found
        ),
        3,
    )


def _mixed(found: Sequence[Measurement]) -> Iterator[Table]:
    slow = rate_of(grid.SLOW)
    yield Table(
        "mixed",
        f"One worker on {slow} beside {grid.FAST_WORKERS} on 1 Gb/s",
        ("model", "codecs", "mode", "fast ones stand still", "the slow one"),
        tuple(
            (
                *_labels((each.parameters, each.pair)),
                _mode(each),
                seconds(each.median_s),
                seconds(median(each.slow_seconds)),
            )
            for each in found
        ),
        3,
    )


def _mode(of: Measurement) -> str:
    if of.mode == "quorum":
        return f"--quorum {of.quorum} --grace {of.grace_s:g}"
    return {"sync": "synchronous", "async": "--mode async"}[of.mode]


def _labels(row: Row) -> tuple[str, str]:
    return size_of(row[0]), "/".join(row[1])
