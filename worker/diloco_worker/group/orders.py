"""What the leader has the other processes do, as plain values that travel over the group.

An order is a list: its name, then what it needs. Each is a collective, so all of them carry it out
together. Values of tensors never travel here: each process has its own share of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from diloco_protocol import Ledger, VersionId
from diloco_protocol.bitmap import Bitmap
from diloco_protocol.messages import Progress, Push, Released
from diloco_worker.model.flat_state import FlatState
from diloco_worker.session.news import Arrival
from diloco_worker.sync.fragment import Flight, Landing, Outcome

# While a fragment is waited for, nothing is to be done; training goes on; the leader has failed.
WAIT, GO, FAIL = "wait", "go", "fail"
# At the start: how the run is trained, and which versions to begin with.
TERMS, FROZEN, PUT, RESUME = "terms", "frozen", "put", "resume"
# At boundaries, as in `sync.effects`.
CHECK, FREEZE, ANCHOR, OFFER, LAND, REPORT, SAVE = (
    "check",
    "freeze",
    "anchor",
    "offer",
    "land",
    "report",
    "save",
)


@dataclass(frozen=True)
class Agreed:
    """What all processes of a worker know alike, as of the last step.

    Attributes:
        stop_reason: why the script should stop; None while it should not.
        is_over: the run is.
        save_order: the number of the newest order to save.
        metrics: those of the worker.
    """

    stop_reason: str | None = None
    is_over: bool = False
    save_order: int = 0
    progress: Progress = field(default_factory=Progress)
    loss: float | None = None
    sync_every: int = 1
    cycle_start: int = 0
    unsynced_steps: int = 0
    last_error: str | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    result: Any = None  # of what the script has asked for

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Agreed:
        return cls(**{**plain, "progress": Progress(**plain["progress"])})


def landing_as_order(number: int, landing: Landing, step: int) -> list[Any]:
    """The order to bring the model in line with what has come of a fragment."""
    flight, arrival = landing.flight, landing.arrival
    has_values = arrival is not None and arrival.values is not None
    return [
        LAND,
        number,
        landing.outcome.value,
        None if flight is None else [flight.began, flight.push_id],
        None if arrival is None else arrival.version.plain(),
        has_values,
        landing.is_load,
        landing.is_void,
        [[push, _of_bitmap(chunks)] for push, chunks in landing.settled.items()],
        None if landing.may_count is None else _of_bitmap(landing.may_count),
        step,
    ]


def version_in(order: Sequence[Any]) -> VersionId | None:
    """The version whose values an order of `landing_as_order` needs."""
    return VersionId.from_plain(order[4]) if order[4] is not None and order[5] else None


def landing_of(order: Sequence[Any], values: FlatState | None) -> Landing:
    """What a process that does not lead brings its share of the model in line with.

    Its flight and arrival have only what the values follow from.
    """
    _, number, outcome, flown, version, _, is_load, is_void, settled, may_count, _ = order
    flight = arrival = None
    if flown is not None:
        began, push_id = flown
        push = Push(b"", push_id, number, 0, "fp32")
        flight = Flight(push, began, began, began)
    if version is not None:
        released = Released(number, VersionId.from_plain(version), Ledger())
        arrival = Arrival(released, frozenset(), values)
    return Landing(
        Outcome(outcome),
        flight,
        arrival,
        is_load=is_load,
        is_void=is_void,
        settled={push: _bitmap(chunks) for push, chunks in settled},
        may_count=None if may_count is None else _bitmap(may_count),
    )


def _of_bitmap(chunks: Bitmap) -> list[Any]:
    return [chunks.size, chunks.to_bytes()]


def _bitmap(plain: Sequence[Any]) -> Bitmap:
    size, raw = plain
    return Bitmap.from_bytes(raw, size)
