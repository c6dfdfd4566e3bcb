"""Carries out one fault after the other."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence

from diloco_lab.chaos.crew import Incarnation
from diloco_lab.chaos.faults import WORKERS, Fault, Injected, Kind
from diloco_lab.chaos.report import workers_in
from diloco_lab.chaos.run_watch import RunWatch
from diloco_protocol.errors import DilocoError
from diloco_worker import DiLoCoClient

RESTART_AFTER_S = 0.3  # the time of a supervisor to restart a process
STAY_ROUNDS = 4  # with a newcomer
FULL_ROUNDS = 2  # while the disk is full
REPORT_WITHIN_S = 15.0
STATUS_WITHIN_S = 5.0
STATUS_EVERY_S = 0.3


def inject_all(watch: RunWatch, faults: Sequence[Fault], injected: list[Injected]) -> None:
    """Carry out a plan. `injected` grows meanwhile, so that it is complete if something breaks."""
    last = "the start"
    for fault in faults:
        watch.wait_rounds(fault.gap, last)
        watch.pause(fault.delay)
        injected.append(Injected(fault))
        inject(watch, injected[-1])
        last = f"{fault.target}: {fault.kind.words}"
    watch.wait_until(lambda: watch.is_quiet, REPORT_WITHIN_S * 2, f"{last} did not end.")


def inject(watch: RunWatch, entry: Injected) -> None:
    """Carry out one fault; its later parts are scheduled."""
    fault, crew, target = entry.fault, watch.crew, entry.fault.target
    if target in WORKERS:
        incarnation = watch.await_joined(target)
    _break_lines(watch, entry)
    match fault.kind:
        case Kind.KILL_WORKER:
            crew.kill_worker(target)
            watch.later(RESTART_AFTER_S, lambda: crew.start_worker(target))
        case Kind.KILL_RELAY:
            crew.relays[target].kill()
            watch.later(RESTART_AFTER_S, lambda: crew.start_relay(target))
        case Kind.STOP_WORKER:
            incarnation.child.process.send_signal(signal.SIGSTOP)
            watch.later(
                fault.seconds, lambda: incarnation.child.process.send_signal(signal.SIGCONT)
            )
            watch.later(fault.seconds, _stands_still(incarnation, time.monotonic()))
        case Kind.CUT:
            crew.proxies[target].cut()
        case Kind.PARTITION | Kind.PARTITION_WAN:
            crew.proxies[target].shut()
            watch.later(fault.seconds, crew.proxies[target].open)
        case Kind.KILL_BROKER:
            crew.broker.kill()
            watch.later(RESTART_AFTER_S, crew.start_broker)
        case Kind.STOP_BROKER:
            broker = crew.broker.process
            broker.send_signal(signal.SIGSTOP)
            watch.later(fault.seconds, lambda: broker.send_signal(signal.SIGCONT))
        case Kind.FILL_DISK:
            _fill_disk(watch, entry)
        case Kind.GUEST | Kind.PASSER:
            _newcomer(watch, entry)
            return  # it takes effect when the newcomer goes
    if entry.at is None:
        entry.at = time.monotonic()


def _break_lines(watch: RunWatch, entry: Injected) -> None:
    """Cut a line within a message; workers of a relay count as away until a version has them again."""
    fault, crew, target = entry.fault, watch.crew, entry.fault.target
    if fault.kind.is_within:
        crew.proxies[target].cut_within(fault.within)
        proxy, sentence = crew.proxies[target], f"{target} sent nothing."
        watch.wait_until(lambda: not proxy.is_armed, REPORT_WITHIN_S, sentence)
    if fault.kind.is_of_relays:
        entry.at = at = time.monotonic()
        for each in crew.behind(target):
            _is_away(watch, each, at)


def _is_away(watch: RunWatch, incarnation: Incarnation, at: float) -> None:
    """It counts as stopped until a version has it again, or it has ended."""
    goes_on = _stands_still(incarnation, at)

    def is_back() -> bool:
        newest = watch.seen[-1] if watch.seen else None
        has_it = (
            newest is not None and newest[0] > at and incarnation.worker in workers_in(newest[1])
        )
        return has_it or incarnation.ended_at is not None

    watch.when(is_back, goes_on)


def _stands_still(incarnation: Incarnation, at: float) -> Callable[[], None]:
    """It counts as stopped from `at` until the returned function is called."""
    incarnation.stops.append((at, float("inf")))

    def goes_on() -> None:
        incarnation.stops.remove((at, float("inf")))
        incarnation.stops.append((at, time.monotonic()))

    return goes_on


def _newcomer(watch: RunWatch, entry: Injected) -> None:
    """Start a worker that takes part for some rounds, and then leaves or is killed."""
    crew, worker = watch.crew, entry.fault.target
    incarnation = crew.start_worker(worker, is_newcomer=True)

    def has_left() -> None:
        entry.is_over = True

    def go() -> None:
        if entry.fault.kind is Kind.PASSER:
            crew.kill_worker(worker)
        else:
            incarnation.child.tell("rest")
            watch.when(lambda: incarnation.ended_at is not None, has_left)
        entry.at = time.monotonic()

    def stay() -> None:
        until = watch.rounds + STAY_ROUNDS
        watch.when(lambda: watch.rounds >= until, go)

    watch.when(lambda: incarnation.joined_at is not None, stay)


def _fill_disk(watch: RunWatch, entry: Injected) -> None:
    """No checkpoint fits for some rounds. The broker must report it, continue, and save again after."""
    crew = watch.crew

    def wait(condition: Callable[[], bool], sentence: str) -> None:
        watch.wait_until(condition, REPORT_WITHIN_S, sentence, STATUS_EVERY_S)

    crew.fill_disk()
    entry.at = time.monotonic()
    try:
        wait(
            lambda: bool(_error(watch)),
            "The checkpoint disk is full and the broker does not report it.",
        )
        watch.wait_rounds(FULL_ROUNDS, "the checkpoint disk was full")
    finally:
        crew.make_room()
    sentence = "There is room for checkpoints again and the broker writes none."
    wait(lambda: _error(watch) == "", sentence)
    entry.is_over = True


def _error(watch: RunWatch) -> str | None:
    """The error of the checkpoints in the broker's status; None if it does not answer."""
    try:
        with DiLoCoClient(watch.crew.address, timeout=STATUS_WITHIN_S) as client:
            checkpoint = client.status()["checkpoint"]
    except DilocoError:
        return None
    return str(checkpoint["error"] or "")
