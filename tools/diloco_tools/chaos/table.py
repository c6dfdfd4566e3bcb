"""The tables that end the drill."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from diloco_tools.chaos.faults import Kind
from diloco_tools.chaos.report import LEAST_SHARE_AVERAGED, ModeReport, Share, rows


def faults_table(reports: Sequence[ModeReport]) -> Table:
    """Faults injected and survived, and how soon the next round closed, by mode."""
    shown = Table(title="faults: survived of injected, seconds to the next round (median, worst)")
    shown.add_column("")
    for report in reports:
        shown.add_column(report.mode, justify="right")
    by_mode = [rows(report.faults) for report in reports]
    for kind in Kind:
        if not any(kind in found for found in by_mode):
            continue
        cells = []
        for found in by_mode:
            row = found.get(kind, {"median": None})
            cell = f"{row['survived']} of {row['injected']}" if kind in found else "-"
            if row["median"] is not None:
                cell += f"  {row['median']:.1f}  {row['worst']:.1f}"
            cells.append(cell)
        shown.add_row(kind.words, *cells)
    return shown


def figures_table(reports: Sequence[ModeReport]) -> Table:
    """The headline and what stands behind it, by mode."""
    shown = Table(title="useful work: inner steps in applied contributions / inner steps trained")
    shown.add_column("", no_wrap=True)
    for report in reports:
        shown.add_column(report.mode, justify="right")
    headline = (Text(_work(report.sturdy_work), "bold") for report in reports)
    shown.add_row(Text("lives not killed (goal 1.0)", "bold"), *headline)
    by_mode = [_cells(report) for report in reports]
    for name in by_mode[0]:
        shown.add_row(name, *(cells[name] for cells in by_mode))
    return shown


def _work(work: Share) -> str:
    return f"{work.part} / {work.whole} = {work.share:.4f}" if work.whole else "-"


def _cells(report: ModeReport) -> dict[str, str]:
    """One mode, from top to bottom; a dash where it did not come to that."""
    audited, told, same, loss, average = "not audited", "-", "-", "-", report.averaged
    if (found := report.findings) is not None:
        others = len(found.problems) - len(found.doubled) - len(found.lost)
        audited = f"{len(found.doubled)}, {len(found.lost)}, {others}"
        told = f"{len(found.dropped)}, {len(found.forgotten)}"
    if report.ending is not None:
        checksums = report.ending.checksums.values()
        same = f"{sum(each == report.ending.checksum for each in checksums)} of {len(checksums)}"
        loss = f"{report.ending.loss:.4f}"
    seconds = f"{report.seconds:.0f}"
    if report.calm is not None:
        seconds += f", {report.seconds + report.calm.seconds:.0f}"
        if report.ending is not None:
            more = report.ending.loss / report.calm.loss - 1
            loss += f", {report.calm.loss:.4f} ({more:+.1%})"
    share = f"{average.part} of {average.whole} = {average.share:.1%}" if average.whole else "-"
    return {
        "all lives": _work(report.all_work),
        "steps lost, kill by kill": " ".join(f"{c.lost:g}" for c in report.kill_costs) or "-",
        "  of these allowed": f"{report.allowed} each",
        "from a kill to the next round": _times(report),
        "rounds, contributions": f"{report.rounds:.0f}, {report.contributions}",
        f"averaged of alive (goal {LEAST_SHARE_AVERAGED:.0%})": share,
        "counted twice, lost, other findings": audited,
        "dropped for a reason, forgotten": told,
        "same version, bit for bit": same,
        "final loss, that of a calm run": loss,
        "checkpoint disk": report.disk,
        "seconds, with the calm run": seconds,
    }


def _times(report: ModeReport) -> str:
    found = [each.next_round for each in report.kills if each.next_round is not None]
    if len(found) < len(report.kills):
        return "never"
    return f"{statistics.median(found):.1f} s, worst {max(found):.1f} s" if found else "-"


NOTES = (
    "A step counts once for each fragment. Lives are processes of workers; a killed one loses at most H "
    "steps (and tau, where fragments are delayed).",
    "Averaged: of the workers alive throughout a round, those in its version; without rounds (async), "
    "in one of 2 W successive versions, where W is the number of workers.",
    "Forgotten: what a killed worker saw counted in a version that was lost with the broker.",
)
