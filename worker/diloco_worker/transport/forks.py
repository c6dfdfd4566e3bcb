"""A forked child, such as a data loader's, has no part in its parent's run and holds nothing of it.

The child inherits every descriptor, and a connection stays open until the last one who holds it closes
it: if the parent dies by kill -9, the broker would see nothing until its heartbeats are missed. ZeroMQ
must not be called on the parent's sockets in a child, so the descriptors of its connections are closed
beneath it. (They, and all others, are closed on exec already.)
"""

from __future__ import annotations

import os
import stat
import weakref
from typing import Protocol


def inode_of(descriptor: int) -> int | None:
    """What tells an open socket from a later one of the same number; None where it is no socket."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_ino if stat.S_ISSOCK(found.st_mode) else None


class Inherited(Protocol):
    """What a child finds in its memory that is its parent's."""

    def leave_to_the_parent(self) -> None:
        """Called in the child, where no thread but the one that forked exists."""


_ours: weakref.WeakSet[Inherited] = weakref.WeakSet()


def keep_from_children(thing: Inherited) -> None:
    """Children that are forked from now on let go of this."""
    _ours.add(thing)


def _leave_to_the_parent() -> None:
    for thing in list(_ours):
        thing.leave_to_the_parent()
    _ours.clear()


if hasattr(os, "register_at_fork"):  # where there is fork
    os.register_at_fork(after_in_child=_leave_to_the_parent)
