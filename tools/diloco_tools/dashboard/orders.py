"""What the page may ask of the broker: read from JSON, checked, and sent to the control address."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from diloco_protocol.clients.operator import Operator, this_user
from diloco_protocol.errors import Unreachable, UsageError
from diloco_protocol.feed import Snapshot

LONGEST_WORKER_ID = 1000  # characters
ANSWER_S = 5.0  # what a broker that is there needs is milliseconds
SHORT_RUN = 8  # characters of a run's name: what the header shows, and what is typed to stop it
ANYWHERE = frozenset({"*", "0.0.0.0", "[::]"})  # hosts to bind to, not to connect to


class BadOrderError(Exception):
    """The request is none that can be carried out; one sentence."""


@dataclass(frozen=True)
class Order:
    """One action of an operator with its arguments."""

    action: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """What came of it: an HTTP status, and a sentence that states the effect."""

    status: int
    ok: bool
    text: str


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e15 and math.isfinite(value) else None


def _count(value: object) -> int | None:
    number = _number(value)
    return int(number) if number is not None and number == int(number) else None


def _name(value: object) -> str | None:
    is_name = isinstance(value, str) and 0 < len(value) <= LONGEST_WORKER_ID
    return value if is_name and isinstance(value, str) else None


SETTINGS: Mapping[str, Callable[[object], float | int | None]] = {
    "outer_lr": _number,
    "outer_momentum": _number,
    "workers": _count,
    "min_workers": _count,
    "sync_every": _count,
    "quorum": _count,
    "grace": _number,
    "save_every": _count,
}
ACTIONS: Mapping[str, Mapping[str, Callable[[object], Any]]] = {
    "save": {},
    "kick": {"worker": _name},
    "set": SETTINGS,
    "pause": {},
    "resume": {},
    "shutdown": {"confirm": _name},
}


def read_order(document: object, snapshot: Snapshot | None) -> Order:
    """An order from the JSON of a request: {"action": ..., argument: value, ...}.

    `shutdown` has to name the run in `confirm`, as `run_name` gives it.

    Raises:
        BadOrderError: anything else than a known action with its arguments.
    """
    if not isinstance(document, dict):
        raise BadOrderError('The request is not a JSON object such as {"action": "save"}.')
    values = dict(document)
    action = values.pop("action", None)
    known = ACTIONS.get(action) if isinstance(action, str) else None
    if known is None or not isinstance(action, str):
        raise BadOrderError(
            f"There is no action {str(action)[:60]!r}; there are {', '.join(ACTIONS)}."
        )
    if strange := sorted(str(name) for name in values.keys() - known.keys()):
        raise BadOrderError(f"{action!r} has no argument {strange[0][:60]!r}.")
    arguments = {name: known[name](value) for name, value in values.items()}
    wanting = known.keys() - arguments.keys() if action != "set" else set()
    wrong = [name for name, value in arguments.items() if value is None]
    if wrong or wanting or (action == "set" and not arguments):
        name = next(iter([*wrong, *wanting]), "a setting")
        raise BadOrderError(f"{action!r} needs {name}, and of the right type.")
    if action == "shutdown" and arguments.pop("confirm") != run_name(snapshot):
        raise BadOrderError("That is not the name of this run, so the broker was not stopped.")
    return Order(action, arguments)


def run_name(snapshot: Snapshot | None) -> str:
    """What is typed to confirm the end of a run; one without a model has no name of its own yet."""
    return snapshot.run[:SHORT_RUN] if snapshot is not None and snapshot.run else "shutdown"


def control_address(given: str | None, snapshot: Snapshot | None, feed_address: str) -> str | None:
    """Where the broker is steered: as `given`, else as its feed says; None while nobody knows.

    A broker that was bound to every address of its machine is sought where its feed is.
    """
    if given is not None:
        return given
    bound = snapshot.control if snapshot is not None else ""
    scheme, separator, rest = bound.partition("://")
    host, colon, port = rest.rpartition(":")
    if not (scheme and separator and colon):
        return None
    if host in ANYWHERE:
        host = feed_address.partition("://")[2].rpartition(":")[0]
    return f"{scheme}://{host}:{port}"


def carry_out(order: Order, address: str, timeout_s: float = ANSWER_S) -> Answer:
    """Ask the broker and wait for its answer; to be called from a thread of its own."""
    try:
        with Operator(address, timeout=timeout_s, who=f"{this_user()}, dashboard") as operator:
            result = operator.ask(order.action, **order.arguments)
    except UsageError as error:
        return Answer(400, False, str(error))
    except Unreachable as error:
        return Answer(504, False, str(error))
    return Answer(200, result.ok, result.text)
