"""How much sooner the broker's tensor work is done by several threads, and how much sooner it could be.

What two processes get done beside each other, each with work and memory of its own, is the most that two
threads can reach here: cores share their memory, and virtual ones often more than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated

import typer

from diloco_lab.bench.parts import Repeats
from diloco_lab.bench.process_pool import ProcessPool
from diloco_lab.bench.report.arithmetic import against, in_turn
from diloco_lab.bench.report.figures import Figure, figure
from diloco_lab.driver.roles import RoleProcess, ask_all

TENSOR_THREADS = "tensor work, by threads"
PAIRS = (("bf16", "fp32"), ("int8", "int8"), ("int4z", "int4z"))


def tensor_threads(
    pool: ProcessPool,
    *,
    threads: Annotated[int, typer.Option(min=2, max=64)] = 2,
    repeats: Repeats = 9,
) -> list[Figure]:
    """Decode, add up and step 64 chunks of two workers with one thread and with several, in turn.

    Beside it, how much sooner as many processes are done beside each other than one after the other.
    """
    figures: list[Figure] = []
    one, several = pool.role("tensor-work", "one"), pool.role("tensor-work", "several")
    twins = [one, *(pool.role("tensor-work", f"twin-{i}") for i in range(threads - 1))]
    for wire, reply in PAIRS:
        ask_all(twins, "prepare", threads=1, wire=wire, reply=reply)
        several.ask("prepare", threads=threads, wire=wire, reply=reply)
        for each in (*twins, several):
            each.ask("round")  # memory is taken for the first time
        alone, lent = in_turn(partial(_seconds, one), partial(_seconds, several), repeats)
        apart, beside = in_turn(partial(_seconds, one), partial(_together, twins), repeats)
        ask_all([*twins, several], "end")
        of_it = partial(figure, TENSOR_THREADS, f"64 chunks, {wire}/{reply}, {threads} threads")
        gain = [1 / each for each in against(lent, alone)]
        most = [threads / each for each in against(beside, apart)]
        target = "tensor threads" if threads == 2 and wire == "bf16" else None
        figures += [
            of_it("one thread", alone, "s"),
            of_it("all", lent, "s"),
            of_it("times as fast", gain, "x", target=target),
            of_it("processes", most, "x"),
        ]
    return figures


def _seconds(role: RoleProcess) -> float:
    return float(role.ask("round")["seconds"])


def _together(roles: Sequence[RoleProcess]) -> float:
    """Until the last of them is done."""
    return max(float(each["seconds"]) for each in ask_all(roles, "round"))
