"""Measures runs of a broker and real workers over lines of a limited rate.

Nothing is trained: workers hold parameters, which change by normal values before a sync, and call the
hook. A training step, if any, is a pause of a given length.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from statistics import fmean, median
from typing import Any, NamedTuple

from diloco_lab.bench.parts.rounds import Round, has_room, one_round
from diloco_lab.bench.process_pool import BrokerProcess
from diloco_lab.bench.report.figures import percentile
from diloco_lab.bench.sizes import parameters_of
from diloco_lab.driver.roles import RoleProcess, ask_all
from diloco_lab.network.lan import grid
from diloco_lab.network.lan.grid import Measurement, Part
from diloco_lab.network.namespaces import HUB, Network, Place, at_the_hub, dtypes, now

SET_UP = 2e10  # bits a second while workers join: the first copy of the model is not measured
INTERVAL_S = 0.01  # between heartbeats
ENOUGH_HEARTBEATS = 100  # for a p99
ROUND_TRIPS = 9  # of which the median counts
PATIENCE_S = 120.0  # beyond the expected time


class Traffic(NamedTuple):
    """The traffic of one sync: bytes of a worker, and the least seconds of all on the busiest line."""

    line_seconds: float
    bytes_up: float
    bytes_down: float


class Meter:
    """Reads the lines of the hub and the first workers, from its creation on."""

    def __init__(self, network: Network, workers: int) -> None:
        self._network = network
        self._before = {each: network.carried(each) for each in (HUB, *network.workers[:workers])}

    def traffic(self, syncs: float) -> Traffic:
        moved = {}
        for member, before in self._before.items():
            now = self._network.carried(member)
            moved[member] = ((now.up - before.up) / syncs, (now.down - before.down) / syncs)
        seconds = [8 * max(ways) / self._network.rates[member] for member, ways in moved.items()]
        _, *of_workers = moved.values()
        ups, downs = zip(*of_workers, strict=True)
        return Traffic(max(seconds), fmean(ups), fmean(downs))


def set_lines(place: Place, hub: float, workers: Sequence[float] = ()) -> None:
    """Rates of the hub and the first workers; the others have the hub's."""
    network = place.network
    network.set_rates(
        dict.fromkeys(network.members, hub) | dict(zip(network.workers, workers, strict=False))
    )


def round_trip(place: Place, address: str) -> float:
    """Seconds to the hub and back, from the place of the first worker."""
    probe = place.role("raw", place.network.workers[0])
    found = probe.ask("round_trips", address=address, count=ROUND_TRIPS)
    return float(median(found["seconds"]))


def measure(place: Place, part: Part) -> Iterator[Measurement]:
    """All of a part; may raise ChildFailed."""
    how = {"round": rounds, "streaming": streaming, "mixed": mixed}
    set_lines(place, SET_UP)
    if has_room(place.pool, part.name, part.size, part.workers):
        yield from how[part.kind](place, part)


def rounds(place: Place, part: Part) -> Iterator[Measurement]:
    """Syncs in which training waits, one after the other, on each line; heartbeats beside them."""
    parameters, trainers = parameters_of(part.size), place.trainers(part.workers)
    skipped = grid.too_long(part)
    # It sends heartbeats from the place of the first worker, so over the same line.
    heart = place.role("hearts", place.network.workers[0])
    with _run(place, part, trainers) as broker:
        one_round(trainers, broker, normal=True)  # allocates memory
        for line in part.lines:
            if line in skipped:
                continue
            set_lines(place, line)
            trip, load = round_trip(place, broker.address), os.getloadavg()[0]
            times = grid.repeats(grid.guess(parameters, part.pair, part.workers, line))
            found: list[Round] = []
            beats: list[float] = []
            meter = Meter(place.network, part.workers)
            for _ in range(times):
                with_beats = _with_heartbeats(heart, trainers, broker)
                found.append(with_beats[0])
                beats += with_beats[1]
            traffic = meter.traffic(times)
            enough = len(beats) >= ENOUGH_HEARTBEATS
            yield Measurement(
                **_about(part, line, trip, load),
                **traffic._asdict(),
                seconds=tuple(each.seconds for each in found),
                broker_cpu_s=median(each.cpu for each in found),
                worker_cpu_s=median(fmean(each.workers_cpu) for each in found),
                heartbeat_p99_s=percentile(beats, 0.99) if enough else None,
                heartbeats=len(beats) if enough else None,
            )
    set_lines(place, SET_UP)


def streaming(place: Place, part: Part) -> Iterator[Measurement]:
    """Fragments that are merged when their reply arrives, while training continues.

    A sync of the whole model on the same line, without overlap, is measured first, for comparison.
    """
    trainers, steps = place.trainers(part.workers), grid.STREAMING_STEPS
    for line in part.lines:
        set_lines(place, SET_UP)
        with _run(place, part, trainers) as broker:
            one_round(trainers, broker, normal=True)
            set_lines(place, line)
            whole = [one_round(trainers, broker, normal=True).seconds for _ in range(2)]
            set_lines(place, SET_UP)
        step_s = grid.STREAMING_TIMES * median(whole) / steps
        fragments = {"num_fragments": grid.FRAGMENTS, "sync_every": steps}
        with _run(place, part, trainers, **fragments) as broker:
            every = steps // grid.FRAGMENTS
            _simulate(trainers, steps, step_s, every)  # each fragment for the first time
            set_lines(place, line)
            trip, load = round_trip(place, broker.address), os.getloadavg()[0]
            meter, windows = Meter(place.network, part.workers), 2
            found = _simulate(trainers, windows * steps, step_s, every)
            traffic = meter.traffic(windows)
            delays = [each["delay"] for each in found]
            waited = tuple(
                fmean(sum(each["waited"][i * steps : (i + 1) * steps]) for each in found)
                for i in range(windows)
            )
            yield Measurement(
                **_about(part, line, trip, load),
                **traffic._asdict(),
                seconds=waited,
                fragments=grid.FRAGMENTS,
                delay_steps=round(median(delays)),
                sync_every=steps,
                step_s=step_s,
                hidden=1 - median(waited) / median(whole),
                sync_seconds=median(whole),
                copy_s=median(each["copy"] for each in found),
            )
            set_lines(place, SET_UP)


def mixed(place: Place, part: Part) -> Iterator[Measurement]:
    """One worker on a slow line beside fast ones: the standstill of each in a sync."""
    trainers, steps = place.trainers(part.workers), grid.MIXED_STEPS
    *fast, slow = trainers
    (line,) = part.lines
    options: dict[str, Any] = {"mode": "async"} if part.mode == "async" else {}
    if part.mode == "quorum":
        options = {"quorum": len(fast), "grace": grid.GRACE_S}
    with place.pool.broker(
        **at_the_hub(place.network),
        **dtypes(part.pair),
        workers=part.workers,
        sync_every=steps,
        **options,
    ) as broker:
        ask_all(trainers, "build", size=part.size)
        ask_all(trainers, "join", address=broker.address)
        _simulate(trainers, steps, 0.0, steps)  # allocates memory
        set_lines(place, line, [*[line] * len(fast), grid.SLOW])
        trip, load = round_trip(place, broker.address), os.getloadavg()[0]
        meter = Meter(place.network, part.workers)
        arguments = {"step_s": grid.MIXED_STEP_S, "drift_every": steps}
        for each in trainers:
            each.tell("simulate", steps=grid.MIXED_SYNCS * steps, **arguments)
        of_fast = [each.hear(PATIENCE_S) for each in fast]
        traffic = meter.traffic(grid.MIXED_SYNCS)
        # The run does not wait for workers that have left, so the slow one can finish.
        ask_all(fast, "leave")
        of_slow = slow.hear(PATIENCE_S)
        set_lines(place, SET_UP)
        slow.ask("leave")
    ends = range(steps - 1, grid.MIXED_SYNCS * steps, steps)
    yield Measurement(
        **_about(part, line, trip, load) | {"worker_bits_per_s": (*[line] * len(fast), grid.SLOW)},
        **traffic._asdict(),
        seconds=tuple(fmean(each["waited"][end] for each in of_fast) for end in ends),
        sync_every=steps,
        step_s=grid.MIXED_STEP_S,
        mode=part.mode,
        quorum=options.get("quorum"),
        grace_s=options.get("grace"),
        slow_seconds=tuple(of_slow["waited"][end] for end in ends),
    )


def _with_heartbeats(
    heart: RoleProcess, trainers: Sequence[RoleProcess], broker: BrokerProcess
) -> tuple[Round, list[float]]:
    """A sync, and the answer times of the heartbeats beside it.

    The heart joins during a round that does not expect it, and leaves before the next.
    """
    heart.ask("join", address=broker.address, names=["heart"])
    heart.tell("beat", interval_s=INTERVAL_S)
    found = one_round(trainers, broker, normal=True)
    heart.tell("rest")
    beats = heart.hear()
    heart.ask("leave")
    return found, beats["seconds"]


def _run(
    place: Place, part: Part, trainers: Sequence[RoleProcess], **options: object
) -> AbstractContextManager[BrokerProcess]:
    """A synchronous run of these, with a boundary after each step unless `sync_every` is given."""
    everything: dict[str, Any] = at_the_hub(place.network) | dtypes(part.pair) | options
    return place.pool.training(trainers, part.size, **everything)


def _simulate(
    trainers: Sequence[RoleProcess], steps: int, step_s: float, drift_every: int
) -> list[dict[str, Any]]:
    for each in trainers:
        each.tell("simulate", steps=steps, step_s=step_s, drift_every=drift_every)
    return [each.hear(steps * step_s + PATIENCE_S) for each in trainers]


def _about(part: Part, line: float, trip: float, load: float) -> dict[str, Any]:
    return {
        "kind": part.kind,
        "parameters": parameters_of(part.size),
        "workers": part.workers,
        **dtypes(part.pair),
        "broker_bits_per_s": line,
        "worker_bits_per_s": (line,) * part.workers,
        "round_trip_s": trip,
        "cores": len(os.sched_getaffinity(0)),
        "load": load,
        "at": now(),
    }
