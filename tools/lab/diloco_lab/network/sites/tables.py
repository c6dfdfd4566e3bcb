"""What was measured of sites: the file that keeps it, `tools/lab/sites.json`, and its tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any

from diloco_lab.bench.sizes import size_of
from diloco_lab.driver.tables import NOTHING, Table, blocks_of, rate_of, seconds, where_measured

WAYS = ("star", "whole", "relays")


@dataclass(frozen=True)
class Measurement:
    """Rounds in one configuration. Bytes are those of all WAN lines in a round, headers included."""

    # "star": all workers at the hub. "whole": the same, but the hub counts only complete pushes, as
    # it does with those of relays. "relays": one at each site.
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
    load: float  # processes that wanted a core in the minute before
    at: str

    @property
    def median_s(self) -> float:
        return median(self.seconds)

    @property
    def pair(self) -> str:
        return f"{self.wire_dtype}/{self.reply_dtype}"


@dataclass(frozen=True)
class Loss:
    """What happened when a part of the tree died, or was cut off."""

    what: str
    away_s: float | None  # until it was started again, or its line mended; None: it was not
    # From its end to the next round that the others made; None: no other worker waited.
    others_s: float | None
    all_s: float | None  # from its return to the next round with all workers in it
    rounds: int  # that the run made in the meantime
    at: str


@dataclass(frozen=True)
class Trained:
    """The loss of a model that was trained over two sites in one way."""

    way: str
    seed: int
    steps: int  # of each worker
    loss: float  # of the global parameters, on held-out text
    pushes: int  # of each site
    at: str


@dataclass(frozen=True)
class SitesFile:
    """All of it, with the machine."""

    command: str
    machine: Mapping[str, Any]
    rounds: tuple[Measurement, ...] = ()
    losses: tuple[Loss, ...] = ()
    trained: tuple[Trained, ...] = ()

    def with_older(self, _: SitesFile) -> SitesFile:
        """All of it is measured again each time."""
        return self


KEYS = ("rounds", "losses", "trained")  # of tables that a page may ask for
NAMES = {
    "star": "all workers at the hub",
    "whole": "the same, pushes counted whole",
    "relays": "a relay at each site",
}


def tables(found: SitesFile) -> list[Table]:
    """None of them is empty."""
    made = (_of_rounds(found), _of_losses(found), _of_training(found))
    return [each for each in made if each.rows]


def _of_rounds(found: SitesFile) -> Table:
    stars = {(each.parameters, each.pair, each.way): each for each in found.rounds}

    def share(of: Measurement, way: str) -> str:
        star = stars.get((of.parameters, of.pair, way))
        if star is None or of.way != "relays":
            return NOTHING
        return f"{of.median_s / star.median_s:.2f}"

    def bytes_of(of: Measurement) -> str:
        star = stars.get((of.parameters, of.pair, "star"))
        moved = of.bytes_up + of.bytes_down
        less = f", 1/{(star.bytes_up + star.bytes_down) / moved:.1f}" if star else ""
        return f"{moved / 1e6:.1f} MB{less if of.way == 'relays' else ''}"

    rows = tuple(
        (
            size_of(each.parameters),
            each.pair,
            NAMES[each.way],
            seconds(each.median_s),
            share(each, "star"),
            share(each, "whole"),
            bytes_of(each),
        )
        for each in found.rounds
    )
    head = (
        "model",
        "codecs",
        "way",
        "a round",
        "of the star",
        "of the same, whole",
        "over the WAN",
    )
    return Table("rounds", "Rounds of two sites", head, rows, labels=3, notes=tuple(_lines(found)))


def _lines(found: SitesFile) -> Iterator[str]:
    for each in found.rounds[:1]:
        yield (
            f"{each.sites} sites of {each.workers // each.sites} workers; each site's line to the "
            f"hub has {rate_of(each.wan_bits_per_s)} each way and {2000 * each.delay_s:.0f} ms there "
            "and back."
        )


def _of_losses(found: SitesFile) -> Table:
    def of(value: float | None) -> str:
        return NOTHING if value is None else seconds(value)

    rows = tuple(
        (each.what, of(each.others_s), of(each.away_s), _rounds_of(each), of(each.all_s))
        for each in found.losses
    )
    head = (
        "what",
        "next round without it",
        "away for",
        "rounds meanwhile",
        "from its return to a round of all",
    )
    return Table("losses", "What is lost, and comes back", head, rows)


def _rounds_of(loss: Loss) -> str:
    """Without a hub there are none."""
    return NOTHING if loss.others_s is None else str(loss.rounds)


def _of_training(found: SitesFile) -> Table:
    by_way: dict[str, list[Trained]] = {}
    for each in found.trained:
        by_way.setdefault(each.way, []).append(each)
    first = {each.seed: each.loss for each in next(iter(by_way.values()), [])}

    def against(rows: list[Trained]) -> str:
        if rows[0].way == found.trained[0].way:
            return NOTHING
        ratios = [100 * (each.loss / first[each.seed] - 1) for each in rows]
        spread = f" ± {stdev(ratios) / len(ratios) ** 0.5:.1f}" if len(ratios) > 1 else ""
        return f"{fmean(ratios):+.1f}%{spread}"

    rows = tuple(
        (way, str(rows[0].pushes), f"{fmean(each.loss for each in rows):.3f}", against(rows))
        for way, rows in by_way.items()
    )
    head = ("way", "pushes of a site", "loss", "against the first")
    return Table("trained", "Several rounds to a push", head, rows)


def blocks(found: SitesFile) -> dict[str, str]:
    """For the page."""
    records = (found.rounds, found.losses, found.trained)
    times = [each.at for rows in records for each in rows]
    loads = [each.load for each in found.rounds]
    where = where_measured(found.machine, times, loads, "configuration")
    return blocks_of(KEYS, tables(found), where)
