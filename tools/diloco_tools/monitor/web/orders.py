"""What the page may ask of the broker: read from JSON and checked."""

from collections.abc import Mapping, Sequence
from typing import Any

from diloco_protocol.addresses import as_reached
from diloco_protocol.feed import Snapshot
from diloco_protocol.monitor.fields import confirmed_by
from diloco_tools.monitor.web.security import Refusal

# The actions of a page, and their arguments: those that are asked for, and, of "set", any of these.
ACTIONS: Mapping[str, Sequence[str]] = {
    "save": (),
    "kick": ("worker",),
    "set": (
        *("outer_lr", "outer_momentum", "workers", "min_workers", "sync_every", "quorum", "grace"),
        "save_every",
    ),
    "pause": (),
    "resume": (),
    "shutdown": ("confirm",),
}


def read_order(document: object, snapshot: Snapshot | None) -> tuple[str, dict[str, Any]]:
    """The action and its arguments from the JSON of a request: {"action": ..., argument: value, ...}.

    Their values are the broker's to check. `shutdown` has to name the run in `confirm`.

    Raises:
        Refusal: anything else than a known action with its arguments.
    """
    if not isinstance(document, dict):
        raise Refusal(400, 'The request is not a JSON object such as {"action": "save"}.')
    arguments = dict(document)
    action = str(arguments.pop("action", None))
    if action not in ACTIONS:
        raise Refusal(400, f"Unknown action {action[:60]!r}; known are {', '.join(ACTIONS)}.")
    if strange := sorted(str(name) for name in arguments.keys() - set(ACTIONS[action])):
        raise Refusal(400, f"{action!r} has no argument {strange[0][:60]!r}.")
    if not arguments and ACTIONS[action]:
        needed = "a setting" if action == "set" else ACTIONS[action][0]
        raise Refusal(400, f"{action!r} needs {needed}.")
    if action == "shutdown" and arguments.pop("confirm") != confirmed_by(snapshot):
        raise Refusal(400, "That is not the name of this run, so the broker was not stopped.")
    return action, arguments


def steering_address(given: str | None, snapshot: Snapshot | None, feed: str) -> str | None:
    """Where the broker is steered: as `given`, else as its feed says; None while unknown."""
    if given is not None:
        return given
    bound = snapshot.control if snapshot is not None else ""
    return as_reached(bound, feed) if bound else None
