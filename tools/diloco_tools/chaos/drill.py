"""One mode of the drill: the run with its faults and its end, the calm run, the audit."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from diloco_protocol.errors import DilocoError
from diloco_tools.chaos.audit import BROKER_LOG, FINAL, audit, contributions, read_folder
from diloco_tools.chaos.crew import MODES, Crew
from diloco_tools.chaos.disk import small_disk
from diloco_tools.chaos.faults import NEWCOMERS, WORKERS, Kind, Scale, plan
from diloco_tools.chaos.inject import Injected, inject_all
from diloco_tools.chaos.report import (
    Aftermath,
    Calm,
    Ending,
    KillCost,
    ModeReport,
    averaged,
    next_after,
    work_of,
)
from diloco_tools.chaos.run_watch import Broken, RunWatch, Seen
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


@dataclass(frozen=True)
class Text:
    """What is trained on: a file for each worker, newcomers included, and held-out windows."""

    shards: dict[str, Path]
    held_out: tuple[Tensor, Tensor]


def prepare_text(folder: Path) -> Text:
    """Cut the demo's text for everybody who will take part."""
    folder.mkdir(parents=True, exist_ok=True)
    names = (*WORKERS, *NEWCOMERS)
    shards = {}
    text = load_text(None, len(names), CONTEXT)
    for name, shard in zip(names, text.shards, strict=True):
        shards[name] = folder / f"{name}.bin"
        shards[name].write_bytes(bytes(shard.numpy()))
    return Text(shards, text.validation)


def drill(
    mode: str,
    folder: Path,
    text: Text,
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
        deadline: on the monotonic clock.
        with_calm: compare with a run without faults.
        say: tells people how it goes.
    """
    empty(folder)
    how = MODES[mode]
    report = ModeReport(mode, how.allowed_loss, scale.rounds)
    began = time.monotonic()
    disk = small_disk(folder / "disk")
    report.disk = disk.how
    crew = Crew(folder, how, disk, text.shards, seed=seed, pause=how.pause_s, durable=durable)
    injected: list[Injected] = []
    ending: Ending | None = None
    with crew:
        watch = RunWatch(crew, deadline)
        try:
            open_run(watch)
            inject_all(watch, plan(seed, mode, scale), injected)
            close_in(watch, scale.rounds)
            until = time.monotonic()
            ending = bring_to_an_end(watch, text.held_out)
        except (Broken, ChildFailed) as error:
            report.broken.append(str(error))
            until = time.monotonic()
    report.seconds = time.monotonic() - began
    judge(report, watch, injected, until=until, began=began, ending=ending)
    if ending is not None and with_calm:
        say(f"{mode}: the same without faults, for comparison")
        calm(report, folder / "calm", text, seed=seed, deadline=deadline)
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
    watch.wait_until(
        lambda: watch.rounds >= 1, START_WITHIN_S, f"No round closed within {START_WITHIN_S:g} s."
    )


def close_in(watch: RunWatch, rounds: int) -> None:
    """Go on until there have been enough rounds, everybody is back, and some more."""
    while watch.rounds < rounds:
        watch.wait_rounds(1, "the last fault")
    for worker in WORKERS:
        watch.await_joined(worker)
    watch.wait_rounds(LAST_ROUNDS, "the last fault")


def bring_to_an_end(watch: RunWatch, held_out: tuple[Tensor, Tensor]) -> Ending:
    """Have everybody leave by itself and pull the same version, and stop the broker.

    Args:
        held_out: windows of text and what comes next, for the loss.

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
        life.job.name: json.loads(life.job.result.read_text())
        for life in staying
        if life.job.pulls and life.job.result.exists()
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


def loss_of(final: GlobalParameters, held_out: tuple[Tensor, Tensor]) -> float:
    """Mean loss of these parameters, nats per byte."""
    model = build_model(0, GPTConfig(context=CONTEXT))
    model.load_state_dict(final.tensors)
    return validation_loss(model, *held_out)


def judge(
    report: ModeReport,
    watch: RunWatch,
    injected: Sequence[Injected],
    *,
    until: float,
    began: float,
    ending: Ending | None,
) -> None:
    """Fill in the report: what came after each fault, and, where the run came to its end, the audit."""
    crew = watch.crew
    if ending is None:
        report.aftermaths = [aftermath(watch.seen, entry, began) for entry in injected]
        return
    report.ending = ending
    (crew.folder / FINAL).write_text(json.dumps({"versions": ending.versions}))
    findings = audit(*read_folder(crew.folder))
    report.findings = findings
    kept = {release.version for release in findings.lineage}
    seen = [each for each in watch.seen if each.release.version in kept]
    report.aftermaths = [aftermath(seen, entry, began) for entry in injected]
    report.rounds = len(seen) / crew.mode.versions_a_round
    entered = contributions(findings.lineage)
    report.contributions = len(entered)
    logs = {log.name: log for log in read_folder(crew.folder)[2]}
    fragments = crew.mode.fragments
    for life in crew.lives:
        name, trained = life.job.name, life.steps
        work = work_of(trained, logs[name], entered, fragments)
        report.all_work += work
        if life.was_killed:
            cost = (work.trained - work.applied) / fragments
            report.kill_costs.append(KillCost(name, trained, cost))
        else:
            report.sturdy_work += work
    report.averaged = averaged(
        [
            (each.at, {c.worker for c in each.release.contributions})
            for each in seen
            if each.at < until
        ],
        crew.lives,
        window=2 * len(WORKERS) if report.mode == "async" else 1,
    )


def aftermath(seen: Sequence[Seen], entry: Injected, began: float) -> Aftermath:
    """What came after a fault, by the versions that were made since."""
    fault, at = entry.fault, entry.at
    if at is None:
        return Aftermath(fault, None, None, False)
    later = [each for each in seen if each.at > at]
    by_target = any(fault.target == c.worker for e in later for c in e.release.contributions)
    match fault.kind:
        case Kind.KILL_BROKER | Kind.STOP_BROKER | Kind.PASSER:
            survived = bool(later)
        case Kind.FILL_DISK:
            survived = bool(later) and entry.is_over
        case Kind.GUEST:
            survived = entry.life is not None and entry.life.ended_at is not None
        case _:
            survived = by_target
    return Aftermath(fault, at - began, next_after(at, (each.at for each in seen)), survived)


def calm(report: ModeReport, folder: Path, text: Text, *, seed: int, deadline: float) -> None:
    """The same mode without faults, until as many contributions are in; its loss goes in the report."""
    empty(folder)
    began = time.monotonic()
    mode = MODES[report.mode]
    with Crew(folder, mode, None, text.shards, seed=seed + 1, pause=0.0) as crew:
        watch = RunWatch(crew, deadline)
        try:
            open_run(watch)
            while watch.contributions < report.contributions:
                watch.wait_rounds(1 / mode.versions_a_round, "the start of the calm run")
            ending = bring_to_an_end(watch, text.held_out)
        except (Broken, ChildFailed) as error:
            report.broken.append(f"The calm run: {error}")
            return
        report.calm = Calm(ending.loss, watch.contributions, time.monotonic() - began)
