"""A snapshot as text: labelled rows of short parts, and the cells of a table of workers. Pure.

`diloco-broker status` and `diloco-top` show the rows as lines, the page as a list.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from diloco_protocol.feed import DEAD, Snapshot, Worker
from diloco_protocol.monitor.fields import (
    OF_DATA_SET,
    OF_ORDER,
    OF_RELAY,
    OF_SNAPSHOT,
    UNHEARD,
    Field,
    Part,
    columns,
)
from diloco_protocol.quantities import NONE

# fmt: off
ROWS = (
    "run", "state", "security", "round", "pushes", "workers", "relays", "last", "end", "commands",
    "data", "model", "outer", "reducing", "fragments", "async", "timeouts", "checkpoint",
    "standby", "rejected", "traffic", "broker",
)
# fmt: on
HEALTHS = (DEAD, "lost", "stalled", "slow", "", "ok")  # most urgent first, "" for unknown ones
_OF_LIVING = ("state", "inner_step", "steps_per_s")  # unknown for workers that are lost or dead


class Row(NamedTuple):
    """A label and at least one part."""

    label: str
    parts: tuple[Part, ...]

    @property
    def text(self) -> str:
        return ", ".join(part.text for part in self.parts)


def rows_of(snapshot: Snapshot, display: str) -> list[Row]:
    """The rows of a display that are not empty, in the order of `ROWS`."""
    found: dict[str, list[Part]] = {label: [] for label in ROWS}

    def add(fields: tuple[Field, ...], record: object, heading: str = "") -> None:
        for field in fields:
            if field.row and display in field.displays and (part := field.part(record)).text:
                found[field.row].append(part._replace(text=heading + part.text))
                heading = ""

    add(OF_SNAPSHOT, snapshot)
    for relay in snapshot.relays:
        add(OF_RELAY, relay, f"{relay.name} ")
    for order in snapshot.orders:
        add(OF_ORDER, order, f"{order.action.replace('_', '-')}: ")
    for data_set in snapshot.data_sets:
        add(OF_DATA_SET, data_set, f"{data_set.name}: ")
    return [Row(label, tuple(parts)) for label, parts in found.items() if parts]


@dataclass(frozen=True)
class Listed:
    """A worker in a table, with the figures that a display computes."""

    worker: Worker
    inner_now: int | None = None  # an estimate of its inner steps, if the last report is old
    up: float | None = None  # bytes a second
    down: float | None = None


def cells(listed: Listed, display: str) -> dict[str, Part]:
    """The cells of a row of a display's table, by path."""
    return {field.path: cell(field, listed) for field in columns(display)}


def cell(field: Field, listed: Listed) -> Part:
    """The cell of a table of workers in the column of this field."""
    if field.path in _OF_LIVING and listed.worker.health in UNHEARD:
        return Part(NONE)
    return field.part(listed) if field.say else Part(field.text(listed.worker))


def sort_key(field: Field, listed: Listed) -> Any:
    """The sort key of a column; None if unknown."""
    worker = listed.worker
    if field.path == "health":
        return HEALTHS.index(worker.health) if worker.health in HEALTHS else len(HEALTHS) - 2
    if field.path == "rate_up":
        return None if listed.up is None else listed.up + (listed.down or 0.0)
    if field.path == "inner_step":
        return (listed.inner_now or worker.inner_step) / (worker.sync_every or 1)
    return field.value(worker)
