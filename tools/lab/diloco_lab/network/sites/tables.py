"""What was measured of sites, as tables for the terminal and for the page `tools/lab/SITES.md`."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean, stdev

from diloco_lab.bench.sizes import size_of
from diloco_lab.driver import page
from diloco_lab.driver.tables import NOTHING, Table, rate_of, seconds
from diloco_lab.network.sites.records import Loss, Measurement, SitesFile, Trained

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
    where = page.where(found.machine, times, loads, "configuration")
    return page.blocks_of(KEYS, tables(found), where)
