"""The tables that end the drill."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from rich.table import Table
from rich.text import Text

from diloco_tools.chaos.faults import Kind
from diloco_tools.chaos.figures import Work, kills, rows
from diloco_tools.chaos.report import LEAST_SHARE_AVERAGED, ModeReport


def faults_table(reports: Sequence[ModeReport]) -> Table:
    """Faults injected and survived, and how soon the next round closed, by mode."""
    shown = Table(title="faults: survived of injected, seconds to the next round (median, worst)")
    shown.add_column("")
    for report in reports:
        shown.add_column(report.mode, justify="right")
    by_mode = [{row.kind: row for row in rows(report.aftermaths)} for report in reports]
    for kind in Kind:
        if not any(kind in found for found in by_mode):
            continue
        cells = []
        for found in by_mode:
            row = found.get(kind)
            if row is None:
                cells.append("-")
                continue
            times = "" if row.median is None else f"  {row.median:.1f}  {row.worst:.1f}"
            cells.append(f"{row.survived} of {row.injected}{times}")
        shown.add_row(kind.value, *cells)
    return shown


def figures_table(reports: Sequence[ModeReport]) -> Table:
    """The headline and what stands behind it, by mode."""
    shown = Table(title="useful work: inner steps in applied contributions / inner steps trained")
    shown.add_column("", no_wrap=True)
    for report in reports:
        shown.add_column(report.mode, justify="right")
    headline = (Text(_work(report.sturdy_work), "bold") for report in reports)
    shown.add_row(Text("lives not killed (goal 1.0)", "bold"), *headline)
    lines: list[tuple[str, Callable[[ModeReport], str]]] = [
        ("all lives", lambda r: _work(r.all_work)),
        ("steps lost, kill by kill", _costs),
        ("  of these allowed", lambda r: f"{r.allowed} each"),
        ("from a kill to the next round", _times),
        ("rounds, contributions", lambda r: f"{r.rounds:.0f}, {r.contributions}"),
        (f"averaged of alive (goal {LEAST_SHARE_AVERAGED:.0%})", _averaged),
        ("counted twice, lost, other findings", _audit),
        ("dropped for a reason, forgotten", _told),
        ("same version, bit for bit", _same),
        ("final loss, that of a calm run", _loss),
        ("checkpoint disk", lambda r: r.disk),
        ("seconds, with the calm run", _seconds),
    ]
    for name, cell in lines:
        shown.add_row(name, *(cell(report) for report in reports))
    return shown


NOTES = (
    "A step counts once for each fragment. Lives are processes of workers; a killed one loses at most H "
    "steps (and tau, where fragments are delayed).",
    "Averaged: of the workers alive throughout a round, those in its version; without rounds (async), "
    "in one of 2 W successive versions, where W is the number of workers.",
    "Forgotten: what a killed worker saw counted in a version that was lost with the broker.",
)


def _work(work: Work) -> str:
    return f"{work.applied} / {work.trained} = {work.share:.4f}" if work.trained else "-"


def _costs(report: ModeReport) -> str:
    return " ".join(f"{cost.lost:g}" for cost in report.kill_costs) or "-"


def _times(report: ModeReport) -> str:
    times = [each.next_round for each in kills(report.aftermaths)]
    if not times:
        return "-"
    if None in times:
        return "never"
    found = [each for each in times if each is not None]
    return f"{statistics.median(found):.1f} s, worst {max(found):.1f} s"


def _averaged(report: ModeReport) -> str:
    found = report.averaged
    return f"{found.averaged} of {found.alive} = {found.share:.1%}" if found.alive else "-"


def _audit(report: ModeReport) -> str:
    found = report.findings
    if found is None:
        return "not audited"
    others = len(found.problems) - len(found.doubled) - len(found.lost)
    return f"{len(found.doubled)}, {len(found.lost)}, {others}"


def _told(report: ModeReport) -> str:
    found = report.findings
    return "-" if found is None else f"{len(found.dropped)}, {len(found.forgotten)}"


def _same(report: ModeReport) -> str:
    ending = report.ending
    if ending is None:
        return "-"
    same = sum(told == ending.checksum for told in ending.checksums.values())
    return f"{same} of {len(ending.checksums)}"


def _loss(report: ModeReport) -> str:
    if report.ending is None:
        return "-"
    loss = report.ending.loss
    if report.calm is None:
        return f"{loss:.4f}"
    return f"{loss:.4f}, {report.calm.loss:.4f} ({loss / report.calm.loss - 1:+.1%})"


def _seconds(report: ModeReport) -> str:
    more = f", {report.seconds + report.calm.seconds:.0f}" if report.calm else ""
    return f"{report.seconds:.0f}{more}"
