"""The role "hearts": members of a run that send heartbeats and never make a step, one or many."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any, TypeVar

import zmq

from diloco_protocol import Manifest, messages, pack, unpack
from diloco_protocol.clients import find_keys
from diloco_protocol.description import describe
from diloco_protocol.frames import MAX_FRAME_BYTES
from diloco_protocol.records import from_plain

M = TypeVar("M", bound=messages.Message)
JOINS_WITHIN_S = 100.0
ANSWERED_WITHIN_S = 30.0  # heartbeats, once no more are sent
SOCKETS = 1 << 13  # of many members


class Heart:
    """One member, from joining on; the model is the run's."""

    def __init__(
        self, context: zmq.Context[Any], address: str, name: str, keys: str | None = None
    ) -> None:
        self._name = name
        self._socket = context.socket(zmq.DEALER)
        self._socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        if (found := find_keys(keys) if keys else None) is not None:
            found.lock(self._socket)
        self._socket.connect(address)
        self.due: list[float] = []  # when each heartbeat was due
        self.answered: list[float] = []  # when each was answered
        self._round = (
            0  # that answers name; an unasked "alive", which tries a connection, names none
        )
        self._send(messages.Control("manifest", 1))
        plain = self._wait_for(messages.Result).data["manifest"]
        of_run = describe(from_plain(Manifest, plain, "manifest"))
        self._send(messages.Join(name, digest=of_run.digest, size=len(of_run.packed)))
        self._session = self._wait_for(messages.Welcome).session

    def beat(self, due: float) -> None:
        """Send a heartbeat that was due at this moment."""
        self.due.append(due)
        self._send(messages.Heartbeat(self._session, 0))

    def leave(self) -> None:
        self._send(messages.Leave(self._session))

    def listen(self, seconds: float) -> None:
        """Note answers to heartbeats for this time."""
        match self._receive(seconds):
            case messages.Notice(what="alive", round=number) if number >= self._round:
                self.answered.append(time.monotonic())
                self._round = number

    def _send(self, message: messages.Message) -> None:
        self._socket.send_multipart(pack(message))

    def _receive(self, seconds: float) -> messages.Message | None:
        """The next message; None without one in time."""
        if not self._socket.poll(int(1000 * seconds)):
            return None
        message, _ = unpack([frame.buffer for frame in self._socket.recv_multipart(copy=False)])
        if isinstance(message, messages.Error | messages.Rejoin):
            raise RuntimeError(f"{self._name} was refused: {message.text}")
        return message

    def _wait_for(self, kind: type[M]) -> M:
        """The next message of this kind; others are ignored."""
        deadline = time.monotonic() + JOINS_WITHIN_S
        while (left := deadline - time.monotonic()) > 0:
            message = self._receive(left)
            if isinstance(message, kind):
                return message
        raise TimeoutError(f"{self._name} waited {JOINS_WITHIN_S:g} s for a {kind.__name__}")


class Hearts:
    """The actions of the role."""

    def __init__(self, is_asked: Callable[[], bool]) -> None:
        self._is_asked = is_asked
        self._context: zmq.Context[Any]
        self._hearts: list[Heart] = []

    def join(self, address: str, names: list[str], keys: str | None = None) -> None:
        """Join a run under these names, with a key file if the broker has keys."""
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, SOCKETS)
        self._hearts = [Heart(self._context, address, name, keys) for name in names]

    def beat(self, interval_s: float) -> dict[str, Any]:
        """Send heartbeats of all in turn, on a fixed schedule, until the next request comes.

        Returns:
            How many were sent, and of those that were answered when each was due and how long its answer
            took, in seconds. Counted from when it was due, so that those behind a slow one are not left
            out.
        """
        for each in self._hearts:
            each.due.clear()
            each.answered.clear()
        next_at = time.monotonic()
        for heart in itertools.cycle(self._hearts):
            while (left := next_at - time.monotonic()) > 0:
                heart.listen(left)
                # With many members times are not measured, and the broker needs the core.
                if len(self._hearts) > 1:
                    time.sleep(max(0.0, next_at - time.monotonic()))
            if self._is_asked():
                break
            heart.beat(next_at)
            next_at += interval_s / len(self._hearts)
        deadline = time.monotonic() + ANSWERED_WITHIN_S
        while time.monotonic() < deadline and (
            late := [each for each in self._hearts if len(each.answered) < len(each.due)]
        ):
            for each in late:
                each.listen(0.001)
        pairs = [pair for of in self._hearts for pair in zip(of.due, of.answered, strict=False)]
        return {
            "sent": sum(len(each.due) for each in self._hearts),
            "due": [due for due, _ in pairs],
            "seconds": [answered - due for due, answered in pairs],
        }

    def leave(self) -> None:
        for each in self._hearts:
            each.leave()
        self._context.destroy(linger=1000)
