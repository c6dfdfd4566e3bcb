"""What a display may ask of the broker: when not, and the question before it, with consequences. Pure.

`diloco-top` and the dashboard offer the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from diloco_protocol.feed import DEAD, Snapshot, Worker
from diloco_protocol.monitor.fields import confirmed_by
from diloco_protocol.quantities import plural, setting


@dataclass(frozen=True)
class Order:
    """One action with its arguments. Without a `title` it is sent at once."""

    action: str
    label: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    off: str = ""  # why it cannot be asked for
    title: str = ""
    text: str = ""
    typed: str = ""  # a word that has to be typed first
    setting: str = ""  # an argument of which a new value has to be typed, a number above 0
    now: str = ""  # the value that holds


def orders(snapshot: Snapshot | None) -> dict[str, Order]:
    """What may be asked with this as the newest snapshot, by name."""
    stopping = unsaved = own = ""
    lr = momentum = wanted = None
    if snapshot is not None:
        lr, momentum, wanted = snapshot.outer.lr, snapshot.outer.momentum, snapshot.workers_wanted
        stopping = "The broker is stopping." if snapshot.state == "stopping" else ""
        unsaved = "" if snapshot.run else "There is nothing to save yet."
        if snapshot.checkpoint is None:
            unsaved = "The broker has no save folder; start it with --save-dir DIR."
        own = f"The {snapshot.outer.optimizer} optimizer's settings are its own and cannot be set here."
    pause = Order("pause", "Pause", off=stopping, title="Pause the run?", text=PAUSE)
    if snapshot is not None and snapshot.state == "paused":
        pause = Order("resume", "Resume", off=stopping)
    return {
        "save": Order("save", "Save now", off=unsaved),
        "pause": pause,
        "lr": _set("outer_lr", "Outer learning rate", lr, APPLIES, own if lr is None else ""),
        "momentum": _set(
            "outer_momentum", "Outer momentum", momentum, APPLIES, own if momentum is None else ""
        ),
        "wanted": _set("workers", "Workers wanted", wanted, WANTED),
        "shutdown": Order(
            "shutdown",
            "Shut down",
            off=stopping,
            title="End the run?",
            text=_of_shutdown(snapshot),
            typed=confirmed_by(snapshot),
        ),
    }


APPLIES = "It applies to the whole run, from the next outer step on."
WANTED = "Round one waits for this many. No worker is removed."
PAUSE = (
    "No further round closes, except one that is closing already: workers train to their next boundary "
    "and wait there until the run is resumed. Nothing is lost."
)


def _set(name: str, title: str, value: float | None, text: str, off: str = "") -> Order:
    now = setting(value)
    return Order("set", title, {}, off, title, f"It is {now} now. {text}", setting=name, now=now)


def kick(worker: Worker, snapshot: Snapshot) -> Order:
    """Removing a worker: what happens to its work, to it, and to the round."""
    title = f"Kick {worker.id}" + (f" on {worker.host}?" if worker.host else "?")
    return Order(
        "kick", "Kick", {"worker": worker.id}, title=title, text=_of_kick(worker, snapshot)
    )


def _of_kick(worker: Worker, snapshot: Snapshot) -> str:
    if worker.health == DEAD:
        return "It is dead. The run no longer waits for it, and it leaves the table."
    said = (
        "The round no longer waits for it. It is notified; it trains on alone or stops, and does not "
        "come back by itself. "
    )
    if worker.inner_step > 0:
        said += f"Its {worker.inner_step} steps since its last push are lost to the run. "
    left = max(0, snapshot.counts.alive - (worker.health != "lost"))
    said += f"{plural(left, 'worker')} {'is' if left == 1 else 'are'} left."
    floor = snapshot.round.floor if snapshot.round else 0
    if snapshot.mode != "async" and left < max(1, floor):
        needs = f" The round needs {floor}: the run will wait for workers to join."
        said += needs if left or floor else " The run will wait."
    return said


def _of_shutdown(snapshot: Snapshot | None) -> str:
    """What is kept, and what the workers do."""
    saved = snapshot.checkpoint if snapshot else None
    saves = "saves if it has a save folder"
    if saved is not None:
        saves = f"saves to {saved.folder}"
    elif snapshot is not None and "checkpoint" in snapshot.raw:
        saves = "saves NOTHING (it has no save folder)"
    return (
        f"A closing round is finished; an open one is abandoned. The broker {saves}, notifies its "
        "workers that the run is over, and exits. To restart it soon: "
        "diloco-broker shutdown --restarting"
    )


def wrong(order: Order, typed: str) -> str:
    """What is wrong with what was typed; nothing if the order may be sent."""
    if order.typed:
        return "" if typed == order.typed else f"That is not {order.typed}: nothing was sent."
    try:
        is_value = 0 < float(typed) < float("inf")
    except ValueError:
        is_value = False
    return "" if is_value else f"{typed!r} is not a number above 0."
