"""The tables that end the drill."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from diloco_lab.chaos.audit import Record
from diloco_lab.chaos.faults import Kind
from diloco_lab.chaos.report import LEAST_SHARE_AVERAGED, Report, kills

NOTES = (
    "A step counts once for each fragment. Lives are processes of workers; a killed one loses at most H "
    "steps (and tau, where fragments are delayed).",
    "Averaged: of the workers alive throughout a round, those in its version; without rounds (async), "
    "in one of 2 W successive versions, where W is the number of workers.",
    "Forgotten: what a killed worker saw counted in a version that was lost with the broker.",
)


def faults_table(reports: Sequence[Report]) -> Table:
    """Faults injected and survived, and how soon the next round closed, by mode."""
    shown = Table(title="faults: survived of injected, seconds to the next round (median, worst)")
    shown.add_column("")
    for report in reports:
        shown.add_column(report["mode"], justify="right")
    by_mode = [{row["kind"]: row for row in report["table"]} for report in reports]
    for kind in Kind:
        if any(kind.words in rows for rows in by_mode):
            shown.add_row(kind.words, *(_survived(rows.get(kind.words)) for rows in by_mode))
    return shown


def _survived(row: Record | None) -> str:
    if row is None:
        return "-"
    times = "" if row["median"] is None else f"  {row['median']:.1f}  {row['worst']:.1f}"
    return f"{row['survived']} of {row['injected']}{times}"


def figures_table(reports: Sequence[Report]) -> Table:
    """The headline and what stands behind it, by mode."""
    shown = Table(title="useful work: inner steps in applied contributions / inner steps trained")
    shown.add_column("", no_wrap=True)
    for report in reports:
        shown.add_column(report["mode"], justify="right")
    headline = (
        Text("not run" if each["not_run"] else _work(each["useful_work"]["not_killed"]), "bold")
        for each in reports
    )
    shown.add_row(Text("lives not killed (goal 1.0)", "bold"), *headline)
    by_mode = [_cells(report) for report in reports]
    for name in by_mode[0]:
        shown.add_row(name, *(cells[name] for cells in by_mode))
    return shown


def _work(work: Record) -> str:
    shown = f"{work['applied']} / {work['trained']} = {work['share']:.4f}"
    return shown if work["trained"] else "-"


def _cells(report: Report) -> dict[str, str]:
    """One mode, from top to bottom; a dash where it did not come to that."""
    findings, told, same, loss = "not audited", "-", "-", "-"
    if (audit := report["audit"]) is not None:
        doubled, lost = len(audit["doubled"]), len(audit["lost"])
        findings = f"{doubled}, {lost}, {len(audit['problems']) - doubled - lost}"
        told = f"{len(audit['dropped'])}, {len(audit['forgotten'])}"
    seconds = f"{report['seconds']:.0f}"
    if (ending := report["ending"]) is not None:
        checksums = ending["checksums"].values()
        same = f"{sum(each == ending['checksum'] for each in checksums)} of {len(checksums)}"
        loss = f"{ending['loss']:.4f}"
        if (calm := report["calm"]) is not None:
            seconds += f", {report['seconds'] + calm['seconds']:.0f}"
            loss += f", {calm['loss']:.4f} ({ending['loss'] / calm['loss'] - 1:+.1%})"
    average = report["averaged"]
    share = f"{average['averaged']} of {average['alive']} = {average['share']:.1%}"
    return {
        "all lives": _work(report["useful_work"]["all"]),
        "steps lost, kill by kill": " ".join(f"{c['lost']:g}" for c in report["kills"]) or "-",
        "  of these allowed": f"{report['allowed_steps_a_kill']} each",
        "from a kill to the next round": _times(report),
        "rounds, contributions": f"{report['rounds']:.0f}, {report['contributions']}",
        f"averaged of alive (goal {LEAST_SHARE_AVERAGED:.0%})": share if average["alive"] else "-",
        "counted twice, lost, other findings": findings,
        "dropped for a reason, forgotten": told,
        "same version, bit for bit": same,
        "final loss, that of a calm run": loss,
        "checkpoint disk": report["disk"],
        "seconds, with the calm run": seconds,
    }


def _times(report: Report) -> str:
    times = [each["next_round_s"] for each in kills(report)]
    if None in times:
        return "never"
    return f"{statistics.median(times):.1f} s, worst {max(times):.1f} s" if times else "-"
