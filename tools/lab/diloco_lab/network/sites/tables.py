"""The measurements of sites: their file, `tools/lab/sites.json`, and its tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from diloco_lab.bench.sizes import size_of
from diloco_lab.driver.tables import (
    NOTHING,
    Table,
    blocks_of,
    rate_of,
    seconds,
    table_of,
    where_measured,
)


@dataclass(frozen=True)
class Measurement:
    """Rounds in one configuration. Bytes are those of all WAN lines in a round, headers included."""

    # "star": all workers at the hub. "whole": the same, but the hub counts only complete pushes.
    # "relays": one at each site.
    way: str
    parameters: int
    sites: int
    workers: int  # of all sites
    wire_dtype: str  # over the WAN
    reply_dtype: str
    wan_bits_per_s: float  # of each site's line, each way
    delay_s: float  # each way
    seconds: tuple[float, ...]  # of each round: until the new version is in all models
    bytes_up: float
    bytes_down: float
    averaged: int  # workers in the last round
    load: float  # processes that needed a core in the minute before
    at: str

    @property
    def median_s(self) -> float:
        return median(self.seconds)

    @property
    def pair(self) -> str:
        return f"{self.wire_dtype}/{self.reply_dtype}"

    @property
    def moved(self) -> float:
        return self.bytes_up + self.bytes_down


@dataclass(frozen=True)
class Loss:
    """The loss of a part of the tree for a while."""

    what: str
    away_s: float | None  # until it was started again, or its line mended; None: it was not
    # From the loss to the next round of the others; None: no other worker waited.
    others_s: float | None
    all_s: float | None  # from its return to the next round of all workers
    rounds: int  # of the run in the meantime
    at: str


@dataclass(frozen=True)
class SitesFile:
    """All measurements, with the machine."""

    command: str
    machine: Mapping[str, Any]
    rounds: tuple[Measurement, ...] = ()
    losses: tuple[Loss, ...] = ()


KEYS = ("rounds", "losses")  # of tables that a page may ask for
NAMES = {
    "star": "all workers at the hub",
    "whole": "the same, only complete pushes count",
    "relays": "a relay at each site",
}


def tables(found: SitesFile) -> list[Table]:
    """All tables with rows."""
    losses = table_of("losses", "What is lost, and comes back", LOSSES, found.losses)
    made = (_of_rounds(found), losses)
    return [each for each in made if each.rows]


def _of_rounds(found: SitesFile) -> Table:
    by_way = {(each.parameters, each.pair, each.way): each for each in found.rounds}

    def over(of: Measurement, way: str) -> str:
        other = by_way.get((of.parameters, of.pair, way))
        is_there = other is not None and of.way == "relays"
        return f"{of.median_s / other.median_s:.2f}" if other and is_there else NOTHING

    def moved(of: Measurement) -> str:
        star = by_way.get((of.parameters, of.pair, "star"))
        less = f", 1/{star.moved / of.moved:.1f}" if star and of.way == "relays" else ""
        return f"{of.moved / 1e6:.1f} MB{less}"

    columns: dict[str, Callable[[Measurement], str]] = {
        "model": lambda of: size_of(of.parameters),
        "codecs": lambda of: of.pair,
        "topology": lambda of: NAMES[of.way],
        "a round": lambda of: seconds(of.median_s),
        "relative to the star": lambda of: over(of, "star"),
        "relative to complete pushes": lambda of: over(of, "whole"),
        "over the WAN": moved,
    }
    return table_of(
        "rounds", "Rounds of two sites", columns, found.rounds, labels=3, notes=_lines(found)
    )


def _lines(found: SitesFile) -> Iterator[str]:
    for each in found.rounds[:1]:
        yield (
            f"{each.sites} sites of {each.workers // each.sites} workers; each site's link to the "
            f"hub has {rate_of(each.wan_bits_per_s)} each way and {2000 * each.delay_s:.0f} ms there "
            "and back."
        )


def _seconds(value: float | None) -> str:
    return NOTHING if value is None else seconds(value)


LOSSES: Mapping[str, Callable[[Loss], str]] = {
    "what": lambda of: of.what,
    "next round without it": lambda of: _seconds(of.others_s),
    "away for": lambda of: _seconds(of.away_s),
    # Without a hub there are none.
    "rounds meanwhile": lambda of: NOTHING if of.others_s is None else str(of.rounds),
    "from its return to a round of all": lambda of: _seconds(of.all_s),
}


def blocks(found: SitesFile) -> dict[str, str]:
    """For the page."""
    records = (found.rounds, found.losses)
    times = [each.at for rows in records for each in rows]
    loads = [each.load for each in found.rounds]
    where = where_measured(found.machine, times, loads, "configuration")
    return blocks_of(KEYS, tables(found), where)
