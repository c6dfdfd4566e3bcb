"""What the page may ask of the broker: read from JSON and checked."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from diloco_protocol.addresses import as_reached
from diloco_protocol.feed import Snapshot
from diloco_tools.monitor.web.security import Refusal

LONGEST_WORKER_ID = 1000  # characters
SHORT_RUN = 8  # characters of a run's name: what the header shows, and what is typed to stop it


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e15 and math.isfinite(value) else None


def _count(value: object) -> int | None:
    number = _number(value)
    return int(number) if number is not None and number == int(number) else None


def _name(value: object) -> str | None:
    return value if isinstance(value, str) and 0 < len(value) <= LONGEST_WORKER_ID else None


ACTIONS: Mapping[str, Mapping[str, Callable[[object], Any]]] = {
    "save": {},
    "kick": {"worker": _name},
    "set": {
        "outer_lr": _number,
        "outer_momentum": _number,
        "workers": _count,
        "min_workers": _count,
        "sync_every": _count,
        "quorum": _count,
        "grace": _number,
        "save_every": _count,
    },
    "pause": {},
    "resume": {},
    "shutdown": {"confirm": _name},
}


def read_order(document: object, snapshot: Snapshot | None) -> tuple[str, dict[str, Any]]:
    """The action and its arguments from the JSON of a request: {"action": ..., argument: value, ...}.

    `shutdown` has to name the run in `confirm`, as `run_name` gives it.

    Raises:
        Refusal: anything else than a known action with its arguments.
    """
    if not isinstance(document, dict):
        raise Refusal(400, 'The request is not a JSON object such as {"action": "save"}.')
    values = dict(document)
    action = str(values.pop("action", None))
    if action not in ACTIONS:
        raise Refusal(400, f"Unknown action {action[:60]!r}; known are {', '.join(ACTIONS)}.")
    known = ACTIONS[action]
    if strange := sorted(str(name) for name in values.keys() - known.keys()):
        raise Refusal(400, f"{action!r} has no argument {strange[0][:60]!r}.")
    arguments = {name: known[name](value) for name, value in values.items()}
    wanting = known.keys() - arguments.keys() if action != "set" else set()
    wrong = [name for name, value in arguments.items() if value is None]
    if wrong or wanting or (action == "set" and not arguments):
        name = next(iter([*wrong, *wanting]), "a setting")
        raise Refusal(400, f"{action!r} needs {name}, and of the right type.")
    if action == "shutdown" and arguments.pop("confirm") != run_name(snapshot):
        raise Refusal(400, "That is not the name of this run, so the broker was not stopped.")
    return action, arguments


def run_name(snapshot: Snapshot | None) -> str:
    """What is typed to confirm the end of a run; one without a model has no name of its own yet."""
    return snapshot.run[:SHORT_RUN] if snapshot is not None and snapshot.run else "shutdown"


def steering_address(given: str | None, snapshot: Snapshot | None, feed: str) -> str | None:
    """Where the broker is steered: as `given`, else as its feed says; None while unknown."""
    if given is not None:
        return given
    bound = snapshot.control if snapshot is not None else ""
    return as_reached(bound, feed) if bound else None
