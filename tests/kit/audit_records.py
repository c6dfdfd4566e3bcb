"""Records of the drill, written as the broker and the workers write them."""

from pathlib import Path
from typing import Any

from diloco_lab.chaos.audit import Version
from diloco_lab.chaos.crew import Life
from diloco_lab.chaos.faults import Fault, Kind

RUN = "00000000000000aa"
WITHIN_S = 10.0


def version(counter: int, tag: str = "t") -> list[Any]:
    return [RUN, counter, f"{tag}{counter}"]


def key(counter: int, tag: str = "t") -> Version:
    return (RUN, counter, f"{tag}{counter}")


def push(push_id: str, worker: str = "a", steps: int = 5, chunks: str = "all") -> dict[str, Any]:
    return {"worker": worker, "push_id": push_id, "steps": steps, "chunks": chunks, "weight": 1.0}


def release(
    counter: int,
    *pushes: dict[str, Any],
    tag: str = "t",
    after: str = "t",
    fragment: int = 0,
    epoch: str = "e",
) -> dict[str, Any]:
    return {
        "version": version(counter, tag),
        "after": version(counter - 1, after) if counter else None,
        "fragment": fragment,
        "round": counter,
        "epoch": epoch,
        "pushes": list(pushes),
    }


def frozen(push_id: str, steps: int = 5, step: int = 5, fragment: int = 0) -> dict[str, Any]:
    return {
        "event": "frozen",
        "worker": "a",
        "push_id": push_id,
        "fragment": fragment,
        "steps": steps,
        "base": version(0),
        "step": step,
    }


def counted(push_id: str, counter: int, tag: str = "t") -> dict[str, Any]:
    return {"event": "counted", "push_id": push_id, "fragment": 0, "version": version(counter, tag)}


def dropped(push_id: str) -> dict[str, Any]:
    return {"event": "dropped", "push_id": push_id, "fragment": 0, "why": "late"}


LEFT = {"event": "left", "step": 10}


def a_fault(kind: Kind, target: str = "w0") -> Fault:
    return Fault(kind, target, 1, 0.0)


def a_life(worker: str = "w0", folder: str = "/nowhere", child: Any = None, **known: Any) -> Life:
    """The first process of a worker."""
    return Life(worker, 1, Path(folder), child, **known)
