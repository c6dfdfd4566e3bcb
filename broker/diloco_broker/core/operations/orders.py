"""Commands of an operator to all workers: save now, or stop. One is pending until all have answered."""

from __future__ import annotations

from typing import Any

from diloco_broker.core import effects
from diloco_broker.core.members.members import Member
from diloco_broker.core.state import Order, RunState
from diloco_protocol.messages import Notice

SAVE, STOP = "save_all", "stop_all"
WHAT = {SAVE: "save", STOP: "stop"}
# Seconds that workers have to save: a script may wait for a round before it checks for the command.
SAVE_WITHIN_S = 600.0
# Seconds that workers have to stop at least; or twice as long as the last round took, if that is longer.
STOP_WITHIN_S = 60.0


def give(state: RunState, action: str) -> effects.Effects:
    """Send a command to all workers; it replaces a pending one of the same kind."""
    number = state.draw() % (1 << 31) + 1  # unlike those of other incarnations of the broker
    within_s = SAVE_WITHIN_S
    if action == STOP:
        within_s = max(STOP_WITHIN_S, 2 * state.last_report.seconds if state.last_report else 0.0)
    order = Order(number, f"An operator asks each worker to {WHAT[action]}.", state.now + within_s)
    state.orders[action] = order
    if state.first_round_pending:  # workers of the run before a restart may still be reconnecting
        order.waiting.update(name for name in state.model.known if name not in state.members)
    for member in state.members:
        yield from _tell(member, action, order)


def tell(state: RunState, member: Member) -> effects.Effects:
    """Send pending commands to a worker that joined or reconnected, unless it has executed them."""
    for action, order in state.orders.items():
        if order.is_pending and member.worker_id not in order.saved:
            yield from _tell(member, action, order)


def tick(state: RunState) -> effects.Effects:
    """Give up commands whose deadline is over.

    A worker that has not stopped may wait for a round that cannot close because others have left. Its
    push remains in that round; `shutdown` ends its wait at the boundary.
    """
    for action, order in state.orders.items():
        if not order.is_pending or state.now < order.until:
            continue
        order.is_given_up = True
        names = ", ".join(sorted(order.waiting))[:300]
        yield effects.warning(f"{action.replace('_', '-')} timed out; no answer from {names}.")
        for member in state.members:
            if action == STOP and member.worker_id in order.waiting:
                yield member.tell(Notice("shutdown", order.text))


def answered(state: RunState, member: Member, number: int) -> effects.Effects:
    """A heartbeat reports the last save command that the worker's script has executed."""
    order = state.orders.get(SAVE)
    if order is not None and order.number == number and member.worker_id in order.waiting:
        order.settle(member.worker_id, is_gone=False)
        yield effects.info(f"{member.worker_id} saved, as requested by an operator.")


def gone(state: RunState, worker_id: str) -> None:
    """A worker died or left: no command waits for it any more."""
    for order in state.orders.values():
        if worker_id in order.waiting:
            order.settle(worker_id, is_gone=True)


def standing(state: RunState, action: str) -> dict[str, Any]:
    """Which workers have answered the newest command of this kind, for operators."""
    order = state.orders.get(action)
    if order is None:
        return {}
    return {
        "order": order.number,
        "waiting": sorted(order.waiting),
        "saved": sorted(order.saved),
        "left": sorted(order.left),
    }


def _tell(member: Member, action: str, order: Order) -> effects.Effects:
    order.waiting.add(member.worker_id)
    order.left.discard(member.worker_id)
    yield member.tell(Notice(action, order.text, round=order.number))
