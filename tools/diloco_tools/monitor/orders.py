"""The commands that `diloco-top` and the dashboard offer, with the question before each. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from diloco_protocol.feed import DEAD, Snapshot, Worker
from diloco_protocol.monitor.fields import confirmed_by
from diloco_protocol.quantities import plural, setting


@dataclass(frozen=True)
class Order:
    """One command with its arguments. Without a `title` it is sent without a question."""

    action: str
    label: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    off: str = ""  # why it is disabled
    title: str = ""
    text: str = ""
    typed: str = ""  # text that the user must type to confirm
    setting: str = ""  # an argument whose new value the user must type, a number above 0
    now: str = ""  # the current value


def orders(snapshot: Snapshot | None) -> dict[str, Order]:
    """The commands by name, with this as the newest snapshot."""
    stopping = unsaved = own = ""
    lr = momentum = wanted = None
    if snapshot is not None:
        lr, momentum, wanted = snapshot.outer.lr, snapshot.outer.momentum, snapshot.workers_wanted
        stopping = "The broker is stopping." if snapshot.state == "stopping" else ""
        unsaved = "" if snapshot.run else "There is nothing to save yet."
        if snapshot.checkpoint is None:
            unsaved = "The broker has no save folder; start it with --save-dir DIR."
        own = f"The settings of the {snapshot.outer.optimizer} optimizer cannot be changed."
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


APPLIES = "A change applies to the whole run, from the next outer step on."
WANTED = "Round one waits for this many workers. No worker is removed."
PAUSE = (
    "No further round closes, except one that is closing already. Workers train to their next boundary "
    "and wait there until the run is resumed. No work is lost."
)


def _set(name: str, title: str, value: float | None, text: str, off: str = "") -> Order:
    now = setting(value)
    return Order("set", title, {}, off, title, f"Currently {now}. {text}", setting=name, now=now)


def kick(worker: Worker, snapshot: Snapshot) -> Order:
    """The removal of a worker, with the consequences."""
    title = f"Kick {worker.id}" + (f" on {worker.host}?" if worker.host else "?")
    text = _of_kick(worker, snapshot)
    return Order("kick", "Kick", {"worker": worker.id}, title=title, text=text)


def _of_kick(worker: Worker, snapshot: Snapshot) -> str:
    if worker.health == DEAD:
        return "The worker is dead. The run stops waiting for it, and it leaves the table."
    said = (
        "The round stops waiting for this worker. It is notified, and continues alone or stops; it does "
        "not rejoin by itself. "
    )
    if worker.inner_step > 0:
        said += f"Its {worker.inner_step} steps since its last push are lost. "
    left = max(0, snapshot.counts.alive - (worker.health != "lost"))
    said += f"{plural(left, 'worker')} {'remains' if left == 1 else 'remain'}."
    floor = snapshot.round.floor if snapshot.round else 0
    if snapshot.mode != "async" and left < max(1, floor):
        needs = f" The round needs {floor}: the run will wait for workers to join."
        said += needs if left or floor else " The run will wait."
    return said


def _of_shutdown(snapshot: Snapshot | None) -> str:
    saved = snapshot.checkpoint if snapshot else None
    saves = "saves if it has a save folder"
    if saved is not None:
        saves = f"saves to {saved.folder}"
    elif snapshot is not None and "checkpoint" in snapshot.raw:
        saves = "saves NOTHING (it has no save folder)"
    return (
        f"A closing round is completed; an open one is abandoned. The broker {saves}, notifies its "
        "workers that the run is over, and exits. To restart the broker instead: "
        "diloco-broker shutdown --restarting"
    )


def wrong(order: Order, typed: str) -> str:
    """The error in the typed text; empty if the command may be sent."""
    if order.typed:
        return "" if typed == order.typed else f"The text is not {order.typed}; not sent."
    try:
        is_value = 0 < float(typed) < float("inf")
    except ValueError:
        is_value = False
    return "" if is_value else f"{typed!r} is not a number above 0."
