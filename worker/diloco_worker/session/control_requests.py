"""Control actions of this worker that wait for answers. Pure.

They are sent on any connection. One that may have been executed is never sent again.
"""

from __future__ import annotations

from collections.abc import Iterator

from diloco_protocol import messages
from diloco_worker.session import effects

# Actions that change nothing, so that they may be sent again after a broken connection.
HARMLESS = ("status", "manifest")


class ControlRequests:
    """The unanswered control actions."""

    def __init__(self) -> None:
        self._open: dict[int, messages.Control] = {}  # sent or to be sent, not answered
        self._sent: set[int] = set()  # on this connection

    def add(self, control: messages.Control) -> None:
        """Add an action; raises ValueError when its number is in use."""
        if control.request in self._open:
            raise ValueError(f"request {control.request} is still unanswered")
        self._open[control.request] = control

    def withdraw(self, request: int) -> None:
        """Drop the request; its answer is ignored."""
        self._open.pop(request, None)
        self._sent.discard(request)

    def send(self) -> Iterator[effects.Effect]:
        """Send the requests that are not sent on this connection."""
        for request, control in self._open.items():
            if request not in self._sent:
                self._sent.add(request)
                yield effects.Send(control)

    def answered(self, result: messages.Result) -> Iterator[effects.Effect]:
        if self._open.pop(result.request, None) is not None:
            self._sent.discard(result.request)
            yield effects.Answered(result.request, result.ok, result.text, result.data)

    def failed(self, error: messages.Error) -> Iterator[effects.Effect]:
        """An error that names no request ends the oldest one."""
        if error.about == "control" and self._sent:
            request = min(self._sent)
            self.withdraw(request)
            yield effects.Answered(request, False, error.text)

    def disconnected(self) -> Iterator[effects.Effect]:
        for request in sorted(self._sent):
            if self._open[request].action not in HARMLESS:
                del self._open[request]
                text = "The connection broke before the answer; the action may have been executed."
                yield effects.Answered(request, None, text)
        self._sent.clear()

    def check_invariants(self) -> None:
        """Raise AssertionError when an invariant is broken; for tests."""
        assert self._sent <= set(self._open)
