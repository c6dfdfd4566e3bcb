"""Rounds with each pair of dtypes, up and down: against bf16 up and fp32 down, and as plain figures.

To compare, two runs live side by side, each with workers of its own, and make rounds in turn.
Pseudo-gradients are normal values, since the size of int4z depends on them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from statistics import median

from diloco_lab.bench.parts.rounds import Round, has_room, one_round, row_of, warm_up
from diloco_lab.bench.process_pool import ProcessPool
from diloco_lab.bench.report.figures import Figure, against, figure, in_turn
from diloco_lab.bench.sizes import parameters_of
from diloco_lab.driver.roles import RoleProcess

CODECS, TABLE = "codecs", "seconds and bytes of a round"
WORKERS = 2
USUAL = ("bf16", "fp32")  # the others are compared with it
PAIRS = [(each, each) for each in ("bf16", "int8", "int4", "int4z")]  # up and down
COMPUTED_GB_PER_S = 1.25  # 10 Gb/s
Pair = tuple[str, str]
Measure = Callable[[Round], float]


def computed(of: Round) -> float:
    """Seconds of a round with a machine for each process and a link of 10 Gb/s at the broker.

    Bytes in, bytes out, the broker's work and a worker's go on at the same time, each process's on one
    core at worst, so the longest of them counts.
    """
    return max(max(of.up, of.down) / COMPUTED_GB_PER_S, of.cpu, *of.workers_cpu)


# By column: how a round is measured, and the target of the column's ratio for int4z.
COLUMNS: Mapping[str, tuple[Measure, str | None]] = {
    "round": (attrgetter("seconds"), "int4z loopback"),
    "CPU of all": (attrgetter("all_cpu"), None),
    "at 10 Gb/s": (computed, "int4z 10 Gb/s"),
}


def codecs(pool: ProcessPool, *, size: str = "125M", repeats: int = 3) -> list[Figure]:
    """Rounds with each pair: the columns, and each over the usual."""
    # The residuals are one more copy of the parameters at each worker.
    if not has_room(
        pool, f"{CODECS}, {row_of(size, WORKERS)}", size, WORKERS, runs=2, more=WORKERS
    ):
        return []
    trainers = pool.roles("trainer", 2 * WORKERS)

    @contextlib.contextmanager
    def run(which: Sequence[RoleProcess], pair: Pair) -> Iterator[Callable[[], Round]]:
        with pool.training(which, size, wire_dtype=pair[0], reply_dtype=pair[1]) as broker:
            a_round = partial(one_round, which, broker, normal=True)
            warm_up(a_round)
            yield a_round

    def figures(pair: Pair, rounds: Sequence[Round], usual: Sequence[Round] = ()) -> list[Figure]:
        of_it = partial(figure, CODECS, f"{size}, {'/'.join(pair)}")
        found = []
        for name, (measure, target) in COLUMNS.items():
            values = [measure(each) for each in rounds]
            found.append(of_it(name, values, "s"))
            if usual:
                ratios = against(values, [measure(each) for each in usual])
                asked = target if pair[0] == "int4z" else None
                found.append(of_it(f"{name} / usual", ratios, "x", target=asked))
        return found

    all_usual: list[Round] = []
    compared: list[Figure] = []
    with run(trainers[:WORKERS], USUAL) as usual_round:
        for pair in PAIRS:
            with run(trainers[WORKERS:], pair) as its_round:
                usual, rounds = in_turn(usual_round, its_round, repeats)
            all_usual += usual
            compared += figures(pair, rounds, usual)
    return [*figures(USUAL, all_usual), *compared]


def table(pool: ProcessPool, *, size: str, workers: int, repeats: int = 3) -> list[Figure]:
    """Plain figures of a round, by parameters, workers and pair, to stand beside those of others.

    Bits are those of a parameter, bytes those of all workers together, both with headers; CPU seconds
    those of the broker and of the busiest worker.
    """
    if not has_room(pool, f"{TABLE}, {row_of(size, workers)}", size, workers, more=workers):
        return []
    trainers = pool.roles("trainer", workers)
    bits = 8e9 / (workers * parameters_of(size))  # of a parameter, in a GB of all workers
    found: list[Figure] = []
    for pair in (USUAL, *PAIRS):
        with pool.training(trainers, size, wire_dtype=pair[0], reply_dtype=pair[1]) as broker:
            a_round = partial(one_round, trainers, broker, normal=True)
            warm_up(a_round)
            rounds = [a_round() for _ in range(repeats)]
        of_it = partial(figure, TABLE, row_of(size, workers, "/".join(pair)))
        up, down = (median(getattr(each, way) for each in rounds) for way in ("up", "down"))
        found += [
            of_it("round", [each.seconds for each in rounds], "s"),
            *(of_it("up", up * of, unit) for of, unit in ((1e3, "MB"), (bits, "bits"))),
            *(of_it("down", down * of, unit) for of, unit in ((1e3, "MB"), (bits, "bits"))),
            of_it("broker CPU", [each.cpu for each in rounds], "s"),
            of_it("worker CPU", [max(each.workers_cpu) for each in rounds], "s"),
        ]
    return found
