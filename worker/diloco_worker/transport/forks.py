"""Keeps a forked child, such as a data loader's, out of its parent's run.

The child inherits every descriptor, and a connection stays open until its last holder closes it: after
a kill -9 of the parent the broker would notice nothing until heartbeats time out. ZeroMQ must not be
called on the parent's sockets in a child, so the descriptors of its connections are closed beneath it.
(All descriptors are closed on exec.)
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
    """An object of the parent in a child's memory."""

    def leave_to_the_parent(self) -> None:
        """Called in the child, where only the forking thread exists."""


_ours: weakref.WeakSet[Inherited] = weakref.WeakSet()
# ZeroMQ's descriptors of open connections, with the inode of each: a later socket may have the same
# number.
_connections: dict[int, int] = {}


def keep_from_children(thing: Inherited) -> None:
    """Call `leave_to_the_parent` of this in children that are forked from now on."""
    _ours.add(thing)


def monitored(monitor: zmq.Socket[bytes]) -> Iterator[dict[str, Any]]:
    """The events of a socket's monitor since the last call. A child closes the connections of this
    socket.
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
    """The inode of an open socket; None for other descriptors."""
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


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_the_parent)
