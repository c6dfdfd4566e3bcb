"""What the training thread calls to take part in a run; the I/O thread does the work.

What comes back is read from the link as from an inbox.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from diloco_protocol.chunks import FragmentLayout
from diloco_protocol.messages import Heartbeat, Push
from diloco_worker.core import events
from diloco_worker.core.connection import Phase
from diloco_worker.core.session import Session
from diloco_worker.model.flat_state import FlatState, WireFragment
from diloco_worker.shell.forks import keep_from_children
from diloco_worker.shell.fragment_buffers import FragmentBuffers
from diloco_worker.shell.inbox import Inbox, Progress
from diloco_worker.shell.io_thread import IoThread


class Link(Inbox):
    """See the head of this module. `start` it once, `close` it once.

    Args:
        address: of the broker's control socket.
        session: the state machine; only the I/O thread touches it from now on.
        capture: copies a fragment of the model to the host, for a broker that has no parameters. Called
            in a thread of its own, and only for fragments that nobody is training at that moment.
        pinned: whether to receive into pinned memory (the model is on a CUDA device).
        states: by fragment, the values of what the session holds already (`Resume`). They are room for
            later versions once training stands on others.
        welcomed: called in the I/O thread with the broker's epoch, whenever it takes this worker in.
        follows_rounds: whether somebody takes `turns`; else they would pile up for ever.
        clock: seconds, monotonic.

    Attributes:
        progress: how training stands, for the next heartbeat.
    """

    def __init__(
        self,
        address: str,
        session: Session,
        *,
        capture: Callable[[FragmentLayout], FlatState] | None = None,
        pinned: bool = False,
        states: Mapping[int, FlatState] | None = None,
        welcomed: Callable[[str], object] = lambda _: None,
        follows_rounds: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(session, follows_rounds=follows_rounds)
        self.address = address
        self.progress = Progress()
        self._clock = clock
        self._io = IoThread(
            address,
            session,
            self,
            FragmentBuffers(
                capture,
                lambda push_id, copied: self._call(self._io.donate, push_id, copied),
                pinned=pinned,
                states=states or {},
            ),
            beat=self._beat,
            welcomed=welcomed,
            clock=clock,
        )
        keep_from_children(self)

    def start(self) -> None:
        self._io.start()

    def offer(self, push: Push, wire: WireFragment) -> None:
        """Push a pseudo-gradient. Neither may change any more."""
        self._call(self._io.offer, push, wire)

    def request_version(self, fragment: int, after: int | None = None) -> None:
        """Ask for the newest version (or one above `after`); it will be in `arrivals`."""
        self._feed(events.RequestVersion(fragment, after))

    def verify_pushes(self, fragment: int, known: frozenset[int]) -> None:
        """Only these pushes of this worker are taken into account in this fragment; see
        `previous_life`."""
        self._feed(events.VerifyPushes(fragment, known))

    def set_base(self, fragment: int, state: FlatState | None) -> None:
        """Training stands on these values from now on; the former ones may be overwritten.

        With None no copy is kept: the model itself has them, and nothing changes them.
        """
        self._call(self._io.set_base, fragment, state)

    def observe(self, event: events.Observe) -> None:
        self._feed(event)

    def ask(self, request: int, action: str, arguments: Mapping[str, Any]) -> None:
        """Send a control action; the answer will be in `results`."""
        self._feed(events.Ask(request, action, dict(arguments)))

    def withdraw(self, request: int) -> None:
        """Nobody waits for the answer to this action any more."""
        self._call(self._io.withdraw, request)

    def beat_now(self) -> None:
        """Send a heartbeat now."""
        self._feed(events.BeatNow())

    def silence(self) -> float | None:
        """Seconds since the broker last said anything; None when it never has."""
        return None if self.last_heard is None else self._clock() - self.last_heard

    def describe(self) -> str:
        """What the link is at, as the end of a sentence."""
        match self.phase:
            case Phase.NEW | Phase.CONNECTING | Phase.AWAY:
                away = ", which restarts" if self.restarting else ""
                return f"no broker answers at {self.address}{away}"
            case Phase.JOINING:
                return self.last_error or "the broker has not answered the join"
            case Phase.JOINED:
                return "the broker is there"
            case Phase.REFUSED:
                return str(self.refusal)
            case Phase.LEFT:
                return "this worker has left"

    def close(self, reason: str = "", patience: float = 5.0) -> None:
        """Tell the broker, close the sockets, end the thread: within `patience` seconds."""
        self._feed(events.Depart(reason))
        self._io.join(patience)

    def wake(self) -> None:
        """Wake up those in `wait_for`; for signal handlers."""
        self._io.wake()

    def leave_to_the_parent(self) -> None:
        """In a forked child: this link has ended, and holds no connection open."""
        self._io.leave_to_the_parent()
        self.condition = threading.Condition()  # the thread may have held the other one
        self.has_ended = True
        self.last_error = "This process was forked from the worker's; only that one is in the run."

    def _beat(self, session: bytes, uploading: bool) -> Heartbeat:
        return self.progress.heartbeat(session, uploading=uploading)

    def _feed(self, event: events.Event) -> None:
        self._call(self._io.feed, event)

    def _call(self, action: Callable[..., object], *args: Any) -> None:
        self._io.call(partial(action, *args))
