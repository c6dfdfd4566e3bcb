"""One mode of the drill: the run with its faults and its end, the calm run, the audit."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from diloco_protocol.errors import DilocoError
from diloco_tools.chaos import report as reports
from diloco_tools.chaos.audit import (
    BROKER_LOG,
    FINAL,
    audit,
    contributions,
    read_folder,
    version_of,
)
from diloco_tools.chaos.crew import MODES, Crew
from diloco_tools.chaos.disk import small_disk
from diloco_tools.chaos.faults import NEWCOMERS, WORKERS, Scale, plan
from diloco_tools.chaos.inject import inject_all
from diloco_tools.chaos.job import RESULT
from diloco_tools.chaos.report import Calm, Ending, KillCost, ModeReport
from diloco_tools.chaos.run_watch import Broken, RunWatch
from diloco_tools.chaos.worker import CONTEXT, checksum, named
from diloco_tools.demo.data import load_text
from diloco_tools.demo.model import GPTConfig, build_model, validation_loss
from diloco_tools.processes import ChildFailed
from diloco_worker import DiLoCoClient, GlobalParameters

START_WITHIN_S = 60.0
LEAVE_WITHIN_S = 40.0
PULL_WITHIN_S = 20.0
EXIT_WITHIN_S = 30.0
BROKER_EXIT_WITHIN_S = 10.0
LAST_ROUNDS = 4  # after everything; a crash may have taken one back
Windows = tuple[Tensor, Tensor]  # of held-out text, and what comes next, for the loss


def prepare_text(folder: Path) -> Windows:
    """Cut the demo's text for everybody who will take part, newcomers included: NAME.bin for each."""
    folder.mkdir(parents=True, exist_ok=True)
    names = (*WORKERS, *NEWCOMERS)
    text = load_text(None, len(names), CONTEXT)
    for name, shard in zip(names, text.shards, strict=True):
        (folder / f"{name}.bin").write_bytes(bytes(shard.numpy()))
    return text.validation


def drill(
    mode: str,
    folder: Path,
    texts: Path,
    held_out: Windows,
    scale: Scale,
    *,
    seed: int,
    deadline: float,
    durable: bool,
    with_calm: bool,
    say: Callable[[str], None],
) -> ModeReport:
    """Run one mode; whatever is broken is in the report.

    Args:
        folder: for everything that the run writes; emptied first.
        texts: what `prepare_text` has filled.
        deadline: on the monotonic clock.
        with_calm: compare with a run without faults.
        say: tells people how it goes.
    """
    empty(folder)
    how = MODES[mode]
    report = ModeReport(mode, how.allowed_loss, scale.rounds, time.monotonic())
    disk = small_disk(folder / "disk")
    report.disk = disk.how
    with Crew(folder, how, disk, texts, seed=seed, pause=how.pause_s, durable=durable) as crew:
        watch = RunWatch(crew, deadline)
        try:
            open_run(watch)
            inject_all(watch, plan(seed, mode, scale), report.faults)
            close_in(watch, scale.rounds)
            until = time.monotonic()
            report.ending = bring_to_an_end(watch, held_out)
        except (Broken, ChildFailed) as error:
            report.broken.append(str(error))
    report.seconds = time.monotonic() - report.began
    if report.ending is None:
        for fault in report.faults:
            reports.judge_fault(fault, watch.seen)
        return report
    judge(report, watch, until)
    if with_calm:
        say(f"{mode}: the same without faults, for comparison")
        empty(folder / "calm")
        with Crew(folder / "calm", how, None, texts, seed=seed + 1, pause=0.0) as crew:
            calm(report, RunWatch(crew, deadline), held_out)
    return report


def empty(folder: Path) -> None:
    """Make this folder, or remove what an earlier drill has left in it.

    Raises:
        OSError: there is something else in it.
    """
    if folder.exists() and any(folder.iterdir()):
        if not (folder / BROKER_LOG).exists():
            raise FileExistsError(f"{folder} holds something that is not of a drill")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)


def open_run(watch: RunWatch) -> None:
    """Start everybody at once (who is early waits for the broker), and wait for the first round."""
    watch.crew.start_broker()
    for worker in WORKERS:
        watch.crew.start_worker(worker)
    sentence = f"No round closed within {START_WITHIN_S:g} s."
    watch.wait_until(lambda: watch.rounds >= 1, START_WITHIN_S, sentence)


def close_in(watch: RunWatch, rounds: int) -> None:
    """Go on until there have been enough rounds, everybody is back, and some more."""
    while watch.rounds < rounds:
        watch.wait_rounds(1, "the last fault")
    for worker in WORKERS:
        watch.await_joined(worker)
    watch.wait_rounds(LAST_ROUNDS, "the last fault")


def bring_to_an_end(watch: RunWatch, held_out: Windows) -> Ending:
    """Have everybody leave by itself and pull the same version, and stop the broker.

    Raises:
        Broken: somebody hangs.
    """
    crew = watch.crew
    staying = [life for life in crew.lives if not life.was_killed]
    for life in staying:
        life.job.finish.touch()
    watch.wait_until(
        lambda: all(life.ended_at is not None for life in staying),
        LEAVE_WITHIN_S,
        f"Not everybody left within {LEAVE_WITHIN_S:g} s of being asked to.",
    )
    try:
        with DiLoCoClient(crew.address, timeout=PULL_WITHIN_S) as observer:
            final = observer.pull()
    except DilocoError as error:
        raise Broken(f"The final version cannot be pulled: {error}") from None
    for life in staying:
        life.job.pull.touch()
    until = time.monotonic() + EXIT_WITHIN_S
    exits = {life.job.name: life.child.wait(until - time.monotonic()) for life in staying}
    hung = [name for name, code in exits.items() if code is None]
    if hung:
        raise Broken(f"{', '.join(hung)} did not end within {EXIT_WITHIN_S:g} s of leaving.")
    results = {
        life.job.name: json.loads(life.job.file(RESULT).read_text())
        for life in staying
        if life.job.pulls and life.job.file(RESULT).exists()
    }
    began = time.monotonic()
    crew.broker.process.terminate()
    broker_exit = crew.broker.wait(BROKER_EXIT_WITHIN_S)
    return Ending(
        named(final),
        checksum(final),
        {name: result["checksum"] for name, result in results.items()},
        loss_of(final, held_out),
        exits,
        broker_exit,
        time.monotonic() - began,
    )


def loss_of(final: GlobalParameters, held_out: Windows) -> float:
    """Mean loss of these parameters, nats per byte."""
    model = build_model(0, GPTConfig(context=CONTEXT))
    model.load_state_dict(final.tensors)
    return validation_loss(model, *held_out)


def judge(report: ModeReport, watch: RunWatch, until: float) -> None:
    """Audit a run that came to its end, and fill in the report; from `until` on everybody left."""
    crew = watch.crew
    assert report.ending is not None
    (crew.folder / FINAL).write_text(json.dumps({"versions": report.ending.versions}))
    releases, heads, logs = read_folder(crew.folder)
    report.findings = audit(releases, heads, logs)
    lineage = report.findings.lineage
    kept = {version_of(release["version"]) for release in lineage}
    seen = [each for each in watch.seen if version_of(each[1]["version"]) in kept]
    for fault in report.faults:
        reports.judge_fault(fault, seen)
    report.rounds = len(seen) / crew.mode.versions_a_round
    entered = contributions(lineage)
    report.contributions = len(entered)
    by_name = {log.name: log for log in logs}
    fragments = crew.mode.fragments
    for life in crew.lives:
        name, trained = life.job.name, life.steps
        work = reports.work_of(trained, by_name[name], entered, fragments)
        report.all_work += work
        if life.was_killed:
            cost = (work.whole - work.part) / fragments
            report.kill_costs.append(KillCost(name, trained, cost))
        else:
            report.sturdy_work += work
    report.averaged = reports.averaged(
        [(at, reports.workers_in(release)) for at, release in seen if at < until],
        crew.lives,
        window=2 * len(WORKERS) if report.mode == "async" else 1,
    )


def calm(report: ModeReport, watch: RunWatch, held_out: Windows) -> None:
    """The same mode without faults, until as many contributions are in; its loss goes in the report."""
    began = time.monotonic()
    try:
        open_run(watch)
        while watch.contributions < report.contributions:
            watch.wait_rounds(1 / watch.crew.mode.versions_a_round, "the start of the calm run")
        ending = bring_to_an_end(watch, held_out)
    except (Broken, ChildFailed) as error:
        report.broken.append(f"The calm run: {error}")
        return
    report.calm = Calm(ending.loss, watch.contributions, time.monotonic() - began)
