"""The report of one mode of the drill, and the broken promises. Pure.

A report is the document in MODE.json. Each broken promise is one sentence with its values.

**Useful work** is inner steps inside applied contributions over inner steps trained. The unit is one
inner step on one fragment, so with P fragments a step counts P times: once for each fragment whose
pseudo-gradient must carry it. A pseudo-gradient carries the steps since the last one of its fragment; it
is applied if all of it is in the lineage of the final version, and a part of it counts as nothing. That
holds in every mode; asynchronous runs of the drill have P = 1. Steps of killed incarnations are known
from a file that each step writes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from diloco_lab.chaos.audit import Contribution, Findings, Push, Record, WorkerLog
from diloco_lab.chaos.crew import Incarnation
from diloco_lab.chaos.faults import RELAYS, WORKERS, Injected, Kind
from diloco_lab.driver.tables import Table, table_of

# Seconds of the first rounds on two idle cores, mostly to start five processes.
USUAL_S = 8.0


def slowness_of(calm_s: float) -> float:
    """How much slower than two idle cores a machine with this calm beginning is.

    At least 1; bounds of time are multiplied by it.
    """
    return max(1.0, calm_s / USUAL_S)


LEAST_SHARE_AVERAGED = 0.95
RECOVERY_S = 20.0  # from a kill to the next round, with a process start on a busy machine
SEEN_BY_ITSELF = (Kind.FILL_DISK, Kind.GUEST)  # their end takes more than a new version
Report = dict[str, Any]


def new_report(mode: str, allowed: int) -> Report:
    """An empty report; one kill may cost `allowed` inner steps."""
    return {
        "mode": mode,
        "rounds": 0.0,  # in the lineage of the final version, like the contributions
        "contributions": 0,
        "seconds": 0.0,
        "useful_work": {"all": work(0, 0), "not_killed": work(0, 0)},
        "kills": [],  # for each: the incarnation, inner steps trained in it, and those in no version
        "allowed_steps_a_kill": allowed,
        "averaged": {"alive": 0, "averaged": 0, "share": 1.0},
        "faults": [],  # see `verdict`
        "audit": None,  # see `audited`
        "tapes": {},  # see `drill.replayed`
        "ending": None,  # see `drill.bring_to_an_end`
        "slowness": 1.0,  # of this machine, see `slowness_of`
        "problems": [],
    }


def work(trained: int, applied: int) -> dict[str, Any]:
    """Steps times fragments: trained, and inside applied contributions."""
    return {"trained": trained, "applied": applied, "share": applied / trained if trained else 1.0}


def work_of(
    steps: int, log: WorkerLog, entered: Mapping[Push, Sequence[Contribution]], fragments: int
) -> dict[str, Any]:
    """The inner steps of one incarnation; `entered` are the contributions to the final versions."""
    applied = 0
    for push_id, frozen in log.frozen.items():
        parts = entered.get((log.worker, push_id), ())
        if any(p.chunks is None for p in parts) or (parts and push_id in log.counted):
            applied += frozen["steps"]
    return work(steps * fragments, applied)


def averaged(
    versions: Sequence[tuple[float, Collection[str]]],
    incarnations: Sequence[Incarnation],
    window: int = 1,
) -> dict[str, Any]:
    """The number of workers alive throughout a round that its version contains, over all rounds.

    Args:
        versions: when each was seen, and which workers are in it, in order.
        window: versions that make a round: 1, where there are rounds. In asynchronous mode each version
            is one worker's, so it is twice the number of workers; a worker in none of them was left out.
    """
    alive = hits = 0
    for end in range(window, len(versions), window):
        start_at, end_at = versions[end - window][0], versions[end][0]
        inside = {name for _, names in versions[end - window + 1 : end + 1] for name in names}
        there = {e.worker for e in incarnations if e.is_alive_throughout(start_at, end_at)}
        alive += len(there)
        hits += len(there & inside)
    return {"alive": alive, "averaged": hits, "share": hits / alive if alive else 1.0}


def workers_in(release: Record) -> set[str]:
    """The workers in a version."""
    return {push["worker"] for push in release["pushes"]}


def verdict(entry: Injected, seen: Sequence[tuple[float, Record]], began: float) -> dict[str, Any]:
    """The effect of a fault: seconds to the next version, and whether the run survived it.

    It did if it continued, and the target took part again, or left as intended. `seen` are all versions
    with the time at which each was seen; the run `began` on the same clock.
    """
    at = float("inf") if entry.at is None else entry.at
    later = [each for each in seen if each[0] > at]
    back, target = later, entry.fault.target
    if target in (*WORKERS, *RELAYS):  # it must take part again, or for a relay one of its workers
        names = {target} if target in WORKERS else {*WORKERS[RELAYS.index(target) :: len(RELAYS)]}
        back = [each for each in later if names & workers_in(each[1])]
    return {
        "kind": entry.fault.kind.name.lower(),
        "target": entry.fault.target,
        "at_s": None if entry.at is None else at - began,
        "next_round_s": later[0][0] - at if later else None,
        "survived": bool(back) and (entry.is_over or entry.fault.kind not in SEEN_BY_ITSELF),
    }


def audited(findings: Findings) -> dict[str, Any]:
    """The findings of the audit, for the report."""
    names = ("problems", "doubled", "lost", "remarks", "dropped", "forgotten")
    lists = {name: getattr(findings, name) for name in names}
    return {"versions": len(findings.lineage), **lists}


def problems(report: Report, least_rounds: int) -> Iterator[str]:
    """A sentence for each broken promise; the run had to have `least_rounds`."""
    for each in report["faults"]:
        if not each["survived"]:
            at = each["at_s"]
            when = "never carried out" if at is None else f"{at:.0f} s after the start"
            what = f"{Kind[each['kind'].upper()].words} ({each['target']}, {when})"
            yield f"The run did not survive a fault: {what}."
    allowed_s = RECOVERY_S * report["slowness"]
    for each in report["faults"]:
        if Kind[each["kind"].upper()].is_kill and (each["next_round_s"] or 0.0) > allowed_s:
            yield (
                f"After {each['target']} was killed the next round closed in "
                f"{each['next_round_s']:.1f} s; at most {allowed_s:g} s are allowed."
            )
    if report["audit"] is not None:
        yield from report["audit"]["problems"]
    for incarnation, said in report["tapes"].items():
        if said:
            yield f"The tape of {incarnation} does not replay: {said}"
    if report["ending"] is not None:
        yield from _of_the_end(report["ending"])
        yield from _of_figures(report, least_rounds)


def _of_the_end(ending: Record) -> Iterator[str]:
    first: dict[str, tuple[str, str]] = {}
    for name, held in ending.get("held", {}).items():
        for version, told in held.items():
            who, seen = first.setdefault(version, (name, told))
            if told != seen:
                yield f"{name} and {who} have different values of version {version}."
    checksum = ending["checksum"]
    for name, told in ending["checksums"].items():
        if told != checksum:
            yield (
                f"{name} pulled other parameters than the drill ({told[:12]} instead of "
                f"{checksum[:12]})."
            )
    for name, code in ending["exits"].items():
        if code != 0:
            yield f"{name} ended with exit code {code} instead of 0."
    if ending["broker_exit"] != 0:
        yield (
            f"The broker ended with exit code {ending['broker_exit']} after SIGTERM, in "
            f"{ending['broker_seconds']:.1f} s; 0 was promised."
        )


def _of_figures(report: Report, least_rounds: int) -> Iterator[str]:
    done, allowed = report["useful_work"]["not_killed"], report["allowed_steps_a_kill"]
    if done["applied"] != done["trained"]:
        yield (
            f"Workers that were not killed trained {done['trained']} steps and {done['applied']} are "
            "in the final version; all of them should be."
        )
    for cost in report["kills"]:
        if cost["lost"] > allowed:
            yield (
                f"The kill of {cost['life']} cost {cost['lost']:g} inner steps; at most {allowed} "
                "are allowed."
            )
    if report["rounds"] < least_rounds:
        yield f"The run had {report['rounds']:g} rounds; {least_rounds} were required."
    average = report["averaged"]
    if average["share"] < LEAST_SHARE_AVERAGED:
        yield (
            f"{average['averaged']} of {average['alive']} workers alive throughout a round "
            f"were averaged in it; at least {LEAST_SHARE_AVERAGED:.0%} should be."
        )


def faults_table(reports: Sequence[Report]) -> Table:
    """Faults injected and survived, and the seconds to the next round, by mode."""
    title = "faults: survived of injected, seconds to the next round (median, worst)"
    columns: dict[str, Callable[[Kind], str]] = {"": lambda kind: kind.words}
    columns |= {report["mode"]: partial(_survived, report["faults"]) for report in reports}
    seen = {each["kind"] for report in reports for each in report["faults"]}
    kinds = (kind for kind in Kind if kind.name.lower() in seen)
    return table_of("faults", title, columns, kinds)


def _survived(verdicts: Sequence[Record], kind: Kind) -> str:
    these = [each for each in verdicts if each["kind"] == kind.name.lower()]
    if not these:
        return "-"
    times = [each["next_round_s"] for each in these if each["next_round_s"] is not None]
    told = f"  {statistics.median(times):.1f}  {max(times):.1f}" if times else ""
    return f"{sum(each['survived'] for each in these)} of {len(these)}{told}"


def figures_table(reports: Sequence[Report]) -> Table:
    """The share of useful work and its parts, by mode."""
    by_mode = [_cells(report) for report in reports]
    return Table(
        "figures",
        "useful work: inner steps in applied contributions / inner steps trained",
        ("", *(report["mode"] for report in reports)),
        tuple((name, *(cells[name] for cells in by_mode)) for name in by_mode[0]),
    )


def _work(work: Record) -> str:
    shown = f"{work['applied']} / {work['trained']} = {work['share']:.4f}"
    return shown if work["trained"] else "-"


def _cells(report: Report) -> dict[str, str]:
    """The cells of one mode; a dash if it was not reached."""
    findings, told, same = "not audited", "-", "-"
    if (audit := report["audit"]) is not None:
        twice, gone = len(audit["doubled"]), len(audit["lost"])
        findings = f"{twice}, {gone}, {len(audit['problems']) - twice - gone}"
        told = f"{len(audit['dropped'])}, {len(audit['forgotten'])}"
    if (ending := report["ending"]) is not None:
        checksums = ending["checksums"].values()
        same = f"{sum(each == ending['checksum'] for each in checksums)} of {len(checksums)}"
    lost = " ".join(f"{each['lost']:g}" for each in report["kills"]) or "-"
    average, tapes = report["averaged"], report["tapes"].values()
    share = f"{average['averaged']} of {average['alive']} = {average['share']:.1%}"
    return {
        "incarnations not killed (goal 1.0)": _work(report["useful_work"]["not_killed"]),
        "all incarnations": _work(report["useful_work"]["all"]),
        "steps lost, kill by kill": f"{lost} (at most {report['allowed_steps_a_kill']})",
        "rounds, contributions": f"{report['rounds']:.0f}, {report['contributions']}",
        f"averaged of alive (goal {LEAST_SHARE_AVERAGED:.0%})": share if average["alive"] else "-",
        "counted twice, lost, other findings": findings,
        "dropped for a reason, forgotten": told,
        "same version, bit for bit": same,
        "tapes of the broker that replay": f"{sum(not each for each in tapes)} of {len(tapes)}",
        "seconds": f"{report['seconds']:.0f}",
    }
