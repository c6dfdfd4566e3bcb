"""The measurements and their consequences, as tables for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median

from diloco_lab.bench.sizes import parameters_of, size_of
from diloco_lab.driver.tables import (
    NOTHING,
    Table,
    blocks_of,
    percent,
    rate_of,
    seconds,
    table_of,
    where_measured,
)
from diloco_lab.network.lan import grid
from diloco_lab.network.lan.grid import LanFile, Measurement, Pair

# Tables that a page may ask for.
KEYS = [
    "sync",
    "heartbeats",
    "bytes",
    "streaming",
    "mixed",
]
Row = tuple[int, Pair]  # parameters, codecs
Rounds = dict[Row, dict[float, Measurement]]  # by line
Columns = dict[str, Callable[[Measurement], str]]
LABELS: Columns = {
    "model": lambda of: size_of(of.parameters),
    "codecs": lambda of: "/".join(of.pair),
}


def tables(measurements: Sequence[Measurement]) -> list[Table]:
    """All tables with rows."""
    slow = rate_of(grid.SLOW)
    rounds = _rounds(measurements)
    found = [
        *_of_lines(rounds),
        table_of(
            "bytes",
            "Bytes and work of a sync",
            LABELS | BYTES,
            (by_line[max(by_line)] for by_line in rounds.values()),
            labels=2,
        ),
        table_of(
            "streaming",
            "Streaming: what of a sync is hidden behind training",
            LABELS | STREAMING,
            (each for each in measurements if each.kind == "streaming"),
            labels=3,
        ),
        table_of(
            "mixed",
            f"One worker on {slow} beside {grid.FAST_WORKERS} on 1 Gb/s",
            LABELS | MIXED,
            (each for each in measurements if each.kind == "mixed"),
            labels=3,
        ),
    ]
    return [each for each in found if each.rows]


def blocks(found: LanFile) -> dict[str, str]:
    """For the page."""
    all_of_it = found.measurements
    times, loads = [each.at for each in all_of_it], [each.load for each in all_of_it]
    where = where_measured(found.machine, times, loads, "measurement")
    return blocks_of(KEYS, tables(all_of_it), where)


BYTES: Columns = {
    "up": lambda of: f"{of.bytes_up / 1e6:.3g} MB",
    "down": lambda of: f"{of.bytes_down / 1e6:.3g} MB",
    "broker CPU": lambda of: seconds(of.broker_cpu_s or 0.0),
    "a worker's CPU": lambda of: seconds(of.worker_cpu_s or 0.0),
}
STREAMING: Columns = {
    "link": lambda of: rate_of(of.broker_bits_per_s),
    "sync without overlap": lambda of: seconds(of.sync_seconds or 0.0),
    "steps between two": lambda of: f"{of.sync_every} of {seconds(of.step_s or 0.0)}",
    "training waits": lambda of: seconds(of.median_s),
    "to copy the model twice": lambda of: NOTHING if of.copy_s is None else seconds(2 * of.copy_s),
    "hidden": lambda of: percent(of.hidden or 0.0),
    "merged after": lambda of: f"{of.delay_steps} steps",
}
MODES = {
    "sync": "synchronous",
    "async": "--mode async",
    "quorum": "--quorum {0.quorum} --grace {0.grace_s:g}",
}
MIXED: Columns = {
    "mode": lambda of: MODES[of.mode].format(of),
    "fast workers wait": lambda of: seconds(of.median_s),
    "the slow one": lambda of: seconds(median(of.slow_seconds)),
}


def _rounds(measurements: Sequence[Measurement]) -> Rounds:
    found: Rounds = {}
    for each in measurements:
        is_largest = each.parameters == parameters_of(grid.LARGEST)
        if each.kind == "round" and each.workers == grid.WORKERS and not is_largest:
            found.setdefault((each.parameters, each.pair), {})[each.broker_bits_per_s] = each
    return found


def _of_lines(rounds: Rounds) -> Iterator[Table]:
    """A row for each model and codecs, a column for each line."""

    def sync_on(line: float, row: Row) -> float | None:
        """Seconds: measured, or computed from the next faster line and its utilisation."""
        if found := rounds[row].get(line):
            return found.median_s
        faster = [at for at in rounds[row] if at > line]
        return rounds[row][min(faster)].median_s * min(faster) / line if faster else None

    def time_and_share(line: float, row: Row) -> str:
        if found := rounds[row].get(line):
            return f"{seconds(found.median_s)}, {found.line_seconds / found.median_s:.0%}"
        return NOTHING if (of := sync_on(line, row)) is None else f"{seconds(of)} c"

    def heartbeat(line: float, row: Row) -> str:
        found = rounds[row].get(line)
        p99 = found.heartbeat_p99_s if found else None
        return NOTHING if p99 is None else f"{1e3 * p99:.0f} ms"

    def table(key: str, title: str, cell: Callable[[float, Row], str], *notes: str) -> Table:
        columns: dict[str, Callable[[Row], str]] = {
            "model": lambda row: size_of(row[0]),
            "codecs": lambda row: "/".join(row[1]),
            **{rate_of(line): partial(cell, line) for line in grid.LINES},
        }
        return table_of(key, title, columns, rounds, labels=2, notes=notes)

    title = "A sync, and how much of the line it used"
    yield table("sync", title, time_and_share, *_left_out(rounds))
    yield table("heartbeats", "Heartbeats beside a sync, p99", heartbeat)


def _left_out(rounds: Rounds) -> Iterator[str]:
    missing = [
        f"{size_of(row[0])} {'/'.join(row[1])} at {rate_of(line)}"
        for row, by_line in rounds.items()
        for line in grid.LINES
        if line not in by_line
    ]
    if missing:
        yield (
            f"Not measured, since one sync takes more than {grid.MOST_S:g} s: {', '.join(missing)}. "
            "These are computed (c) from the next faster line, which alone holds those syncs up."
        )
