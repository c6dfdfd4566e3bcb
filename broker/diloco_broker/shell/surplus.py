"""Dropping frames that no message has, at 0.4 microseconds each where receiving them takes 0.9.

The frames of one message come before all others, so that a message with many of them holds up everybody.
pyzmq makes an object of each; here they are not even looked at. The address of the socket and the
functions of libzmq that pyzmq has loaded are there for such uses (`Socket.underlying`).
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from typing import Any

import zmq

# Frames dropped in one call: 0.2 ms.
A_CALL = 512
_MESSAGE_BYTES = 64  # of a `zmq_msg_t`, in every release of libzmq 4


def dropper(socket: zmq.Socket[Any]) -> Callable[[], bool]:
    """A function that drops the next frames of the message that `socket` is in the middle of.

    It returns whether there are more. The socket must not be closed before its last call.
    """
    try:
        module = importlib.import_module("zmq.backend.cython._zmq")
        library = ctypes.PyDLL(
            str(module.__file__)
        )  # calls hold the interpreter: none of them waits
        receive, has_more = library.zmq_msg_recv, library.zmq_msg_more
        begin = library.zmq_msg_init
    except (ImportError, OSError, AttributeError):  # another build of pyzmq
        return _slow_dropper(socket)
    message = ctypes.create_string_buffer(_MESSAGE_BYTES + 8)
    start = -(-ctypes.addressof(message) // 8) * 8  # it holds pointers
    place, handle = ctypes.c_void_p(start), ctypes.c_void_p(socket.underlying)
    flags = ctypes.c_int(int(zmq.NOBLOCK))
    begin(place)

    def drop() -> bool:
        message.raw  # noqa: B018  it is kept as long as this function
        for _ in range(A_CALL):
            if receive(place, handle, flags) < 0:  # a signal came
                return bool(socket.get(zmq.RCVMORE))
            if not has_more(place):
                return False
        return True

    return drop


def _slow_dropper(socket: zmq.Socket[Any]) -> Callable[[], bool]:
    def drop() -> bool:
        return all(socket.recv(zmq.NOBLOCK, copy=False).more for _ in range(A_CALL))

    return drop
