"""The workers of a run as a tree: those of the broker, and below each relay those that are behind it.

What a relay tells of its workers is as old as its last heartbeat, and less than what a broker knows of
its own; what is not told is left out of displays (`Worker.level` above 0).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from diloco_protocol.feed import DEAD, Worker
from diloco_protocol.messages import Behind
from diloco_protocol.records import field_names

UNKNOWN = "unknown"  # the health of those behind a lost relay
_TOLD = set(field_names(Behind)) - {"worker_id", "health", "level"}  # under the same name by both


def below(relay: Worker) -> list[Worker]:
    """Those behind a relay, in the order in which they are told."""
    is_lost = relay.health == "lost"
    return [_worker(each, relay.level + 1, is_lost=is_lost) for each in relay.behind]


def _worker(told: Behind, level: int, *, is_lost: bool) -> Worker:
    same = {name: getattr(told, name) for name in _TOLD}
    health = UNKNOWN if is_lost and told.health != DEAD else told.health
    return Worker(told.worker_id, health=health, level=level + told.level, **same)


def everyone(workers: Iterable[Worker]) -> list[Worker]:
    """The whole tree, each relay before those behind it."""
    return [each for worker in workers for each in (worker, *below(worker))]


def arranged(
    workers: Sequence[Worker],
    key: Callable[[Worker], Any],
    *,
    reverse: bool = False,
    wanted: Callable[[Worker], bool] = lambda _: True,
) -> list[Worker]:
    """The tree with those of one level in order, equal ones by id. A relay stays above who is wanted."""

    def branch(listed: Sequence[Worker]) -> list[Worker]:
        by_id = sorted(_nested(listed), key=lambda each: each[0].id)
        found: list[Worker] = []
        for relay, behind in sorted(by_id, key=lambda each: key(each[0]), reverse=reverse):
            kept = branch(behind)
            if kept or wanted(relay):
                found += [relay, *kept]
        return found

    return branch(everyone(workers))


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
