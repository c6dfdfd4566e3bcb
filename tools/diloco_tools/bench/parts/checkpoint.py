"""What a checkpoint that is being written costs the round that goes on meanwhile.

Two runs live side by side, one with `--save-dir` and one without, and make rounds in turn. A round
of the first is measured right behind another, whose checkpoint is being written then; before the
other run's turn it is waited for.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import partial

from diloco_protocol.feed import Snapshot
from diloco_tools.bench.broker_process import BrokerProcess
from diloco_tools.bench.parts.rounds import one_round
from diloco_tools.bench.process_pool import ProcessPool
from diloco_tools.bench.report.figures import Figure, figure
from diloco_tools.bench.report.ratios import against, in_turn
from diloco_tools.bench.role_process import RoleProcess, ask_all, join_trainers

PART = "checkpoint"
SAVED_WITHIN_S = 60.0


def measure(pool: ProcessPool, *, size: str, workers: int, repeats: int) -> list[Figure]:
    """A round while a checkpoint is written against one of a run that saves nothing.

    Args:
        workers: of each of the two runs.
    """
    both = pool.trainers(2 * workers)
    without, saving = both[:workers], both[workers:]
    folder = pool.folder / "checkpoints"
    shutil.rmtree(folder, ignore_errors=True)
    common = ("--workers", str(workers), "--sync-every", "1")
    options = ("--save-dir", str(folder), "--keep", "1")
    with pool.broker(*common) as plain, pool.broker(*common, *options) as saver:
        ask_all(both, "build", size=size)
        for trainers, broker in ((without, plain), (saving, saver)):
            join_trainers(trainers, broker.address)
            one_round(trainers, broker)
        _wait_until_saved(saver)
        saver.forget_turns()
        limits, rounds = in_turn(
            lambda: one_round(without, plain).seconds,
            lambda: _round_during_a_save(saving, saver),
            repeats,
        )
        turn = saver.longest_turn_ms()
        ask_all(both, "leave")
    shutil.rmtree(folder, ignore_errors=True)
    of_it = partial(figure, PART, f"{size}, {workers} worker{'s' if workers > 1 else ''}")
    return [
        of_it("--no-save", limits, "s"),
        of_it("while saving", rounds, "s"),
        of_it("ratio", against(rounds, limits), "x"),
        of_it("longest turn", turn, "ms", target="turn"),
    ]


def _round_during_a_save(trainers: Sequence[RoleProcess], broker: BrokerProcess) -> float:
    one_round(trainers, broker)  # its checkpoint is written during the next
    seconds = one_round(trainers, broker).seconds
    _wait_until_saved(broker)
    return seconds


def _wait_until_saved(broker: BrokerProcess) -> None:
    """Until the newest checkpoint is that of the round which is open now."""

    def is_saved(snapshot: Snapshot) -> bool:
        saved = snapshot.raw.get("checkpoint")
        number = None if snapshot.round is None else snapshot.round.number
        return isinstance(saved, dict) and saved.get("round") == number

    broker.wait_for(is_saved, SAVED_WITHIN_S)
