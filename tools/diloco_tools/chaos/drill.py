"""One mode of the drill from start to end: the run with its faults, the calm run, the audit."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from diloco_tools.chaos.audit import BROKER_LOG, FINAL, audit, contributions, read_folder
from diloco_tools.chaos.crew import Crew, Life, allowed_loss, fragments_of, versions_a_round
from diloco_tools.chaos.disk import small_disk
from diloco_tools.chaos.ending import bring_to_an_end
from diloco_tools.chaos.faults import GUEST, PASSER, WORKERS, Kind, Scale, plan
from diloco_tools.chaos.figures import Aftermath, Stay, averaged, next_after, work_of
from diloco_tools.chaos.inject import Injected, inject_all
from diloco_tools.chaos.report import Calm, Ending, KillCost, ModeReport
from diloco_tools.chaos.run_watch import Broken, RunWatch, Seen
from diloco_tools.chaos.worker import CONTEXT
from diloco_tools.demo.data import load_shard, validation_windows
from diloco_tools.processes import ChildFailed

# Behind each inner step of the run with faults: leaves room for processes to start. Rounds that do not
# wait for anybody come faster than faults can be survived, so their steps take longer.
PAUSE_S = {"sync": 0.035, "async": 0.06, "streaming": 0.06}
START_WITHIN_S = 60.0
LAST_ROUNDS = 4  # after everything; a crash may have taken one back
WINDOWS = 512  # of the held-out text


@dataclass(frozen=True)
class Text:
    """What is trained on: a file for each worker, newcomers included, and held-out windows."""

    shards: dict[str, Path]
    held_out: tuple[Tensor, Tensor]


def prepare_text(folder: Path) -> Text:
    """Cut the demo's text for everybody who will take part."""
    folder.mkdir(parents=True, exist_ok=True)
    names = (*WORKERS, GUEST, PASSER)
    shards = {}
    for number, name in enumerate(names):
        text, held_out = load_shard(None, number, len(names), CONTEXT)
        shards[name] = folder / f"{name}.bin"
        shards[name].write_bytes(bytes(text.numpy()))
    return Text(shards, validation_windows(held_out, WINDOWS, CONTEXT))


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
    report = ModeReport(mode, allowed_loss(mode), scale.rounds)
    began = time.monotonic()
    disk = small_disk(folder / "disk")
    report.disk = disk.how
    crew = Crew(folder, mode, disk, text.shards, seed=seed, pause=PAUSE_S[mode], durable=durable)
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
    report.rounds = len(seen) / versions_a_round(crew.mode)
    entered = contributions(findings.lineage)
    report.contributions = len(entered)
    lives = {(life.worker, life.number): life for life in read_folder(crew.folder)[2]}
    fragments = fragments_of(crew.mode)
    for life in crew.lives:
        stay = stay_of(life)
        work = work_of(stay, lives[stay.worker, stay.number], entered, fragments)
        report.add_work(stay, work)
        if stay.was_killed:
            cost = (work.trained - work.applied) / fragments
            report.kill_costs.append(KillCost(life.name, stay.trained, cost))
    report.averaged = averaged(
        [
            (each.at, {c.worker for c in each.release.contributions})
            for each in seen
            if each.at < until
        ],
        [stay_of(life) for life in crew.lives],
        window=2 * len(WORKERS) if crew.mode == "async" else 1,
    )


def stay_of(life: Life) -> Stay:
    return Stay(
        life.worker,
        life.number,
        life.steps,
        life.joined_at,
        life.ended_at,
        life.was_killed,
        tuple(life.stops),
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
    with Crew(folder, report.mode, None, text.shards, seed=seed + 1, pause=0.0) as crew:
        watch = RunWatch(crew, deadline)
        try:
            open_run(watch)
            while watch.contributions < report.contributions:
                watch.wait_rounds(1 / versions_a_round(report.mode), "the start of the calm run")
            ending = bring_to_an_end(watch, text.held_out)
        except (Broken, ChildFailed) as error:
            report.broken.append(f"The calm run: {error}")
            return
        report.calm = Calm(ending.loss, watch.contributions, time.monotonic() - began)
