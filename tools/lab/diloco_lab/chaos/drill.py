"""One mode of the drill: the run with its faults and its end, and the audit."""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

from diloco_lab.chaos import audit as audits
from diloco_lab.chaos import report as reports
from diloco_lab.chaos.audit import Record
from diloco_lab.chaos.crew import MODES, Crew
from diloco_lab.chaos.faults import NEWCOMERS, WORKERS, Injected, Scale, plan
from diloco_lab.chaos.inject import inject_all
from diloco_lab.chaos.report import Report
from diloco_lab.chaos.run_watch import Broken, RunWatch
from diloco_lab.chaos.worker import CONTEXT, checksum, named
from diloco_lab.driver.experiment import emptied
from diloco_lab.driver.options import broker_command
from diloco_protocol.errors import DilocoError
from diloco_tools.demo.data import load_text
from diloco_tools.processes import ChildFailed
from diloco_worker import DiLoCoClient

START_WITHIN_S = 60.0
START_SLOWNESS = 10.0  # of a machine whose speed is not known yet
CALM_ROUNDS = 3  # at the beginning of a run, before its first fault
LEAVE_WITHIN_S = 40.0
PULL_WITHIN_S = 20.0
EXIT_WITHIN_S = 30.0
BROKER_EXIT_WITHIN_S = 10.0
TEXTS = "text"  # the folder beside those of the modes
LAST_ROUNDS = 4  # at the end; a crash may have taken one back


def prepare_text(out: Path) -> None:
    """Split the demo's text over all workers, with the later ones: NAME.bin for each."""
    folder = out / TEXTS
    folder.mkdir(parents=True, exist_ok=True)
    names = (*WORKERS, *NEWCOMERS)
    text = load_text(None, len(names), CONTEXT)
    for name, shard in zip(names, text.shards, strict=True):
        (folder / f"{name}.bin").write_bytes(bytes(shard.numpy()))


def drill(mode: str, out: Path, scale: Scale, seed: int) -> Report:
    """Run one mode in its folder, emptied first; broken promises are in the report."""
    how = MODES[mode]
    folder = emptied(out / mode, audits.BROKER_LOG)
    began, injected, broken = time.monotonic(), list[Injected](), list[str]()
    report = reports.new_report(mode, how.allowed_loss)
    crew = Crew(folder, how, out / TEXTS, seed=seed)
    with crew:
        watch = RunWatch(crew, START_SLOWNESS)
        try:
            open_run(watch)
            watch.wait_rounds(CALM_ROUNDS, "the start")
            report["slowness"] = watch.slowness = reports.slowness_of(time.monotonic() - began)
            inject_all(watch, plan(seed, mode, scale.of(how.relays)), injected)
            close_in(watch, scale.rounds)
            until = time.monotonic()
            report["ending"] = bring_to_an_end(watch)
        except (Broken, ChildFailed) as error:
            broken.append(str(error))
    report["seconds"] = round(time.monotonic() - began, 1)
    seen = watch.seen
    if report["ending"] is not None:
        seen = judge(report, watch, until)
    report["faults"] = [reports.verdict(each, seen, began) for each in injected]
    broken += reports.problems(report, scale.rounds)
    report["problems"] = [f"{mode}: {sentence}" for sentence in broken]
    return report


def open_run(watch: RunWatch) -> None:
    """Start all processes at once (early ones wait for the broker), and wait for the first round."""
    watch.crew.start_broker()
    for relay in watch.crew.mode.relays:
        watch.crew.start_relay(relay)
    for worker in WORKERS:
        watch.crew.start_worker(worker)
    sentence = f"No round closed within {watch.stretched(START_WITHIN_S):g} s."
    watch.wait_until(lambda: watch.rounds >= 1, START_WITHIN_S, sentence)


def close_in(watch: RunWatch, rounds: int) -> None:
    """Continue until there were enough rounds and all workers are back, and some rounds more."""
    while watch.rounds < rounds:
        watch.wait_rounds(1, "the last fault")
    for worker in WORKERS:
        watch.await_joined(worker)
    watch.wait_rounds(LAST_ROUNDS, "the last fault")


def bring_to_an_end(watch: RunWatch) -> dict[str, Any]:
    """Have all workers leave and pull the same version, and stop the broker.

    Returns:
        `versions`, the final one of each fragment; `checksum` of its parameters as the drill pulled it,
        `checksums` as each surviving worker did, by name of its incarnation; `held`, by incarnation a
        checksum of each version that was the base of training; `exits` of the workers that were not
        killed; `broker_exit` after SIGTERM, None if it had to be killed, and the `broker_seconds` until
        then.

    Raises:
        Broken: a process hangs.
    """
    crew = watch.crew
    staying = [incarnation for incarnation in crew.incarnations if not incarnation.was_killed]
    for incarnation in staying:
        incarnation.child.tell("rest")
    watch.wait_until(
        lambda: all(incarnation.ended_at is not None for incarnation in staying),
        LEAVE_WITHIN_S,
        f"Not all workers left within {watch.stretched(LEAVE_WITHIN_S):g} s of the request.",
    )
    try:
        with DiLoCoClient(crew.address, timeout=watch.stretched(PULL_WITHIN_S)) as observer:
            final = observer.pull()
    except DilocoError as error:
        raise Broken(f"The final version cannot be pulled: {error}") from None
    within_s = watch.stretched(EXIT_WITHIN_S)
    held = {incarnation.name: incarnation.child.hear(within_s)["held"] for incarnation in staying}
    pulls = [incarnation for incarnation in staying if not incarnation.is_newcomer]
    for incarnation in pulls:
        incarnation.child.tell("pull", broker=crew.address)
    checksums = {
        incarnation.name: incarnation.child.hear(within_s)["checksum"] for incarnation in pulls
    }
    for incarnation in staying:
        incarnation.child.dismiss()
    exits = {incarnation.name: incarnation.child.wait(within_s) for incarnation in staying}
    for name, relay in crew.relays.items():
        relay.process.terminate()
        exits[name] = relay.wait(watch.stretched(BROKER_EXIT_WITHIN_S))
    began = time.monotonic()
    crew.broker.process.terminate()
    broker_exit = crew.broker.wait(watch.stretched(BROKER_EXIT_WITHIN_S))
    return {
        "versions": named(final),
        "checksum": checksum(final),
        "checksums": checksums,
        "held": held,
        "exits": exits,
        "broker_exit": broker_exit,
        "broker_seconds": time.monotonic() - began,
    }


def replayed(folder: Path) -> dict[str, str]:
    """By incarnation of the broker the error of a replay of its tape; "" for an equal replay."""
    said = {}
    for tape in sorted(folder.glob("broker.*.tape")):
        done = subprocess.run(
            broker_command("replay", str(tape)), check=False, capture_output=True, text=True
        )
        said[tape.stem] = (done.stderr or done.stdout).strip() if done.returncode else ""
    return said


def judge(report: Report, watch: RunWatch, until: float) -> list[tuple[float, Record]]:
    """Audit a run that has ended, and complete the report; workers left from `until` on.

    Returns:
        The versions that the watch has seen, without lost ones.
    """
    crew, fragments = watch.crew, watch.crew.mode.fragments
    final = {"versions": report["ending"]["versions"]}
    (crew.folder / audits.FINAL).write_text(json.dumps(final))
    releases, heads, logs = audits.read_folder(crew.folder)
    findings = audits.audit(releases, heads, logs)
    report["audit"] = reports.audited(findings)
    report["tapes"] = replayed(crew.folder)
    seen = [each for each in watch.seen if each[1] in findings.lineage]
    report["rounds"] = len(seen) / crew.mode.versions_a_round
    entered = audits.contributions(findings.lineage)
    report["contributions"] = len(entered)
    by_name = {log.name: log for log in logs}
    trained, applied = Counter[str](), Counter[str]()
    for incarnation in crew.incarnations:
        name, steps = incarnation.name, incarnation.steps
        work = reports.work_of(steps, by_name[name], entered, fragments)
        if incarnation.was_killed:
            lost = (work["trained"] - work["applied"]) / fragments
            report["kills"].append({"life": name, "trained": steps, "lost": lost})
        for whose in ("all",) if incarnation.was_killed else ("all", "not_killed"):
            trained[whose] += work["trained"]
            applied[whose] += work["applied"]
    for whose in report["useful_work"]:
        report["useful_work"][whose] = reports.work(trained[whose], applied[whose])
    report["averaged"] = reports.averaged(
        [(at, reports.workers_in(release)) for at, release in seen if at < until],
        crew.incarnations,
        window=2 * len(WORKERS) if report["mode"] == "async" else 1,
    )
    return seen
