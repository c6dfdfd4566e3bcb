"""The workers of a run as a tree: those of the broker, and below each relay those that are behind it.

What a relay tells of its workers is as old as its last heartbeat, and less than what a broker knows of
its own; what is not told is left out of displays (`Worker.level` above 0).
"""

from collections.abc import Callable, Iterable, Sequence

from diloco_protocol.feed import DEAD, Worker
from diloco_protocol.messages import Behind

UNKNOWN = "unknown"  # the health of those behind a lost relay


def below(relay: Worker) -> list[Worker]:
    """Those behind a relay, in the order in which they are told."""
    is_lost = relay.health == "lost"
    return [_worker(each, relay.level + 1, is_lost=is_lost) for each in relay.behind]


def _worker(told: Behind, level: int, *, is_lost: bool) -> Worker:
    return Worker(
        told.worker_id,
        host=told.host,
        state=told.state,
        health=UNKNOWN if is_lost and told.health != DEAD else told.health,
        round=told.round,
        inner_step=told.inner_step,
        inner_age_s=told.inner_age_s,
        sync_every=told.sync_every,
        step=told.step,
        steps_per_s=told.steps_per_s,
        loss=told.loss,
        loss_is_finite=told.loss_is_finite,
        beat_age_s=told.beat_age_s,
        sync_age_s=told.sync_age_s,
        staleness=told.staleness,
        pushes=told.pushes,
        same_as=told.same_as,
        workers=told.workers,
        level=level + told.level,
    )


def everyone(workers: Iterable[Worker]) -> list[Worker]:
    """The whole tree, each relay before those behind it."""
    return [each for worker in workers for each in (worker, *below(worker))]


def arranged(
    workers: Sequence[Worker],
    key: Callable[[Worker], float | str],
    *,
    reverse: bool = False,
    wanted: Callable[[Worker], bool] = lambda _: True,
) -> list[Worker]:
    """The tree with those of one level in order, equal ones by id. A relay stays above who is wanted."""
    return _arranged(everyone(workers), key, reverse=reverse, wanted=wanted)


def _arranged(
    workers: Sequence[Worker],
    key: Callable[[Worker], float | str],
    *,
    reverse: bool,
    wanted: Callable[[Worker], bool],
) -> list[Worker]:
    """The same of one branch, each relay of which is followed by its own."""
    found: list[Worker] = []
    for relay, behind in _in_order(_nested(workers), key, reverse=reverse):
        kept = _arranged(behind, key, reverse=reverse, wanted=wanted)
        if kept or wanted(relay):
            found += [relay, *kept]
    return found


def _in_order(
    branches: Sequence[tuple[Worker, list[Worker]]],
    key: Callable[[Worker], float | str],
    *,
    reverse: bool,
) -> list[tuple[Worker, list[Worker]]]:
    by_id = sorted(branches, key=lambda branch: branch[0].id)
    return sorted(by_id, key=lambda branch: key(branch[0]), reverse=reverse)


def _nested(workers: Sequence[Worker]) -> list[tuple[Worker, list[Worker]]]:
    """Each of the uppermost level, with those that follow it further down."""
    found: list[tuple[Worker, list[Worker]]] = []
    top = min((worker.level for worker in workers), default=0)
    for worker in workers:
        if worker.level > top and found:
            found[-1][1].append(worker)
        else:
            found.append((worker, []))
    return found


def without_relays(workers: Iterable[Worker]) -> list[Worker]:
    """Those that train, wherever they are."""
    return [worker for worker in everyone(workers) if worker.workers is None]


def not_listed(relay: Worker) -> int:
    """How many workers downstream of a relay it omitted from its report, which is bounded."""
    told = sum(each.workers is None and each.health != DEAD for each in relay.behind)
    return max(0, (relay.workers or 0) - told) if relay.level == 0 else 0
