"""Control actions of this worker that wait for their answers. Pure.

A `token` is no matter here: actions go out on any connection that is joined. One that may have been
carried out is never sent a second time.
"""

from __future__ import annotations

from collections.abc import Iterator

from diloco_protocol.messages import Control, Error, Result
from diloco_worker.core.events import Answered, Ask, Effect, Send

# Actions that change nothing, so that they may be sent again after a broken connection.
HARMLESS = ("status", "manifest")


class Asks:
    """See the head of this module."""

    def __init__(self) -> None:
        self._asks: dict[int, Ask] = {}  # sent or to be sent, not answered
        self._sent: set[int] = set()  # on this connection

    def add(self, ask: Ask) -> None:
        """Take on an action; raises ValueError when its number is in use."""
        if ask.request in self._asks:
            raise ValueError(f"request {ask.request} is still unanswered")
        self._asks[ask.request] = ask

    def withdraw(self, request: int) -> None:
        """Nobody waits for this answer any more."""
        self._asks.pop(request, None)
        self._sent.discard(request)

    def send(self) -> Iterator[Effect]:
        """Send what has not been sent on this connection."""
        for request, ask in self._asks.items():
            if request not in self._sent:
                self._sent.add(request)
                yield Send(Control(ask.action, request, ask.arguments))

    def answered(self, result: Result) -> Iterator[Effect]:
        if self._asks.pop(result.request, None) is not None:
            self._sent.discard(result.request)
            yield Answered(result.request, result.ok, result.text, result.data)

    def failed(self, error: Error) -> Iterator[Effect]:
        """An error that answers a control action names no request: it ends the oldest one."""
        if error.about == "control" and self._sent:
            request = min(self._sent)
            self.withdraw(request)
            yield Answered(request, False, error.text)

    def disconnected(self) -> Iterator[Effect]:
        for request in sorted(self._sent):
            if self._asks[request].action not in HARMLESS:
                del self._asks[request]
                text = "The connection broke before the answer; it may have been carried out."
                yield Answered(request, None, text)
        self._sent.clear()

    def check_invariants(self) -> None:
        """Raise AssertionError when the books do not balance; for tests."""
        assert self._sent <= set(self._asks)
