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
from collections.abc import Iterator
from typing import Any, Protocol

import zmq
from zmq.utils.monitor import parse_monitor_message


class Inherited(Protocol):
    """What a child finds in its memory that is its parent's."""

    def leave_to_the_parent(self) -> None:
        """Called in the child, where no thread but the one that forked exists."""


_ours: weakref.WeakSet[Inherited] = weakref.WeakSet()
# ZeroMQ's descriptors of the connections that are up, and the inode of each, which tells it from a later
# socket of the same number.
_connections: dict[int, int] = {}


def keep_from_children(thing: Inherited) -> None:
    """Children that are forked from now on let go of this."""
    _ours.add(thing)


def monitored(monitor: zmq.Socket[bytes]) -> Iterator[dict[str, Any]]:
    """The events that a socket's monitor has seen since the last call.

    A child closes the connections of each socket whose monitor is read here.
    """
    while monitor.poll(0):
        event: dict[str, Any] = dict(parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK)))
        if event["event"] in (zmq.EVENT_CONNECTED, zmq.EVENT_ACCEPTED):
            inode = _inode_of(event["value"])
            if inode is not None:
                _connections[event["value"]] = inode
        elif event["event"] == zmq.EVENT_DISCONNECTED:
            _connections.pop(event["value"], None)
        yield event


def _inode_of(descriptor: int) -> int | None:
    """The inode of an open socket; None where the descriptor is not one."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_ino if stat.S_ISSOCK(found.st_mode) else None


def _leave_to_the_parent() -> None:
    for descriptor, inode in _connections.items():
        if _inode_of(descriptor) == inode:  # else it is closed already
            os.close(descriptor)
    _connections.clear()
    for thing in list(_ours):
        thing.leave_to_the_parent()
    _ours.clear()


if hasattr(os, "register_at_fork"):  # where there is fork
    os.register_at_fork(after_in_child=_leave_to_the_parent)
