"""What the I/O thread and the training thread tell each other."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from diloco_protocol import ModelLayout, Refused, RunConfig
from diloco_protocol.messages import Heartbeat
from diloco_worker.core.compatibility import Terms
from diloco_worker.core.effects import Answered, Carried, Deliver, Granted, Joined
from diloco_worker.core.previous_life import SENT_BEFORE
from diloco_worker.core.session import Session
from diloco_worker.core.sync.news import Arrival, LinkState, News, Rejection, Turning

# Of a warning in a heartbeat; whole, it is in the worker's log.
MAX_WARNING_LENGTH = 300


@dataclass(frozen=True)
class Progress:
    """How training stands, for heartbeats. `tokens` and `step` are totals."""

    step: int = 0
    inner_step: int = 0
    waiting: bool = False
    steps_per_s: float | None = None
    loss: float | None = None
    tokens: int = 0
    merge_delay: int | None = None
    warning: str | None = None

    def heartbeat(self, session: bytes, *, uploading: bool) -> Heartbeat:
        return Heartbeat(
            session=session,
            step=self.step,
            inner_step=self.inner_step,
            state="pushing" if uploading else "waiting" if self.waiting else "training",
            steps_per_s=self.steps_per_s,
            loss=self.loss,
            tokens=self.tokens,
            merge_delay=self.merge_delay,
            warning=None if self.warning is None else self.warning[:MAX_WARNING_LENGTH],
        )


class Inbox:
    """What the I/O thread tells the training thread.

    Attributes are to be read under `condition`, or where a moment's lag does no harm. Counters and
    `last_heard` wake nobody who waits.

    Args:
        session: as it is before the thread has it.
        follows_rounds: whether somebody takes `turns`; else they would pile up for ever.

    Attributes:
        phase, terms, last_heard, reconnections, retries: of the session.
        feed: the address that the broker publishes on.
        refusal: set when the broker refuses this worker; `refused_for_good` when that was at joining.
        stopping: why this worker should end, as the broker says it, else None.
        restarting: the broker's sentence when it goes away to come back; None once it is back.
        arrivals: whole versions by fragment, until `take`n.
        rejections: pushes that were dropped, by push id.
        turns: what concerns rounds, in the order in which it came; `take_news` takes it. Always empty
            for one that does not follow rounds.
        sync_every: H that the broker has worked out for this worker (Dynamic Local Updates).
        uploaded: pushes in flight whose chunks are all in at the broker.
        put_off: pushes in flight that the broker takes nothing of yet.
        results: answers to control actions, by request.
        bytes_up, bytes_down: sent and received.
        last_error: the last thing that went wrong, a sentence.
        has_forgotten: what the session held already does not fit the run and is not held any more.
        has_ended: the I/O thread is gone, for whatever reason.
    """

    def __init__(self, session: Session, *, follows_rounds: bool = True) -> None:
        self.condition = threading.Condition()
        self.phase = session.phase
        self.terms: Terms | None = None
        self.last_heard: float | None = None
        self.reconnections = 0
        self.retries = 0
        self.feed: str | None = None
        self.refusal: Refused | None = None
        self.refused_for_good = False
        self.stopping: str | None = None
        self.restarting: str | None = None
        self.arrivals: dict[int, Arrival] = {}
        self.rejections: dict[int, Rejection] = {}
        self.turns: deque[Turning] = deque(maxlen=None if follows_rounds else 0)
        self.sync_every: int | None = None
        self.uploaded: frozenset[int] = frozenset()
        self.put_off: frozenset[int] = frozenset()
        self.results: dict[int, Answered] = {}
        self.bytes_up = 0
        self.bytes_down = 0
        self.last_error: str | None = None
        self.has_forgotten = False
        self.has_ended = False

    # For the training thread.

    @property
    def config(self) -> RunConfig | None:
        return self.terms.config if self.terms else None

    @property
    def layout(self) -> ModelLayout | None:
        return self.terms.layout if self.terms else None

    @property
    def has_news(self) -> bool:
        """Something is in `arrivals` or `rejections`; cheap to look at."""
        return bool(self.arrivals or self.rejections)

    def take(self, fragment: int) -> Arrival | None:
        """The whole version of a fragment that has arrived, once."""
        with self.condition:
            return self.arrivals.pop(fragment, None)

    def take_news(self) -> News:
        """All that has come since the last look, at one moment."""
        with self.condition:
            news = News(tuple(self.turns), dict(self.arrivals), dict(self.rejections))
            self.turns.clear()
            self.arrivals.clear()
            self.rejections.clear()
            return news

    def state(
        self,
        *,
        silence: float | None,
        asked_to_stop: str | None = None,
        address: str = "",
        description: str = "",
    ) -> LinkState:
        """How things stand now; what is handed in is known elsewhere."""
        assert self.config is not None
        return LinkState(
            config=self.config,
            sync_every=self.sync_every,
            phase=self.phase,
            reconnections=self.reconnections,
            uploaded=self.uploaded,
            put_off=self.put_off,
            has_ended=self.has_ended,
            is_over=self.stopping is not None,
            is_restarting=self.restarting is not None,
            asked_to_stop=asked_to_stop,
            refusal=None if self.refusal is None else str(self.refusal),
            silence=silence,
            address=address,
            last_error=self.last_error,
            description=description,
        )

    def take_rejection(self, push_id: int) -> Rejection | None:
        with self.condition:
            return self.rejections.pop(push_id, None)

    def wait_for(self, what: Callable[[], bool], timeout: float) -> bool:
        """Wait until `what` is true, or the thread has ended, at most `timeout` seconds."""
        with self.condition:
            return self.condition.wait_for(lambda: what() or self.has_ended, timeout) and what()

    # For the I/O thread.

    def joined(self, effect: Joined) -> None:
        """The broker has taken this worker in: what it was told before has no meaning any more."""
        with self.condition:
            self.refusal = None
            self.stopping = self.restarting = None
            self.feed = effect.welcome.feed
            self.turns.clear()
            self.turns.append(effect)

    def refused(self, code: str, text: str, *, final: bool) -> None:
        with self.condition:
            self.refusal = Refused(code, text)
            self.refused_for_good = final

    def turn(self, effect: Granted | Carried) -> None:
        """Something that concerns rounds."""
        with self.condition:
            self.turns.append(effect)

    def deliver(self, effect: Deliver, values: Any) -> None:
        """A version is whole; `values` are as the shell keeps them, None where no copy is kept."""
        released = effect.released
        arrival = Arrival(
            released,
            frozenset(() if effect.counted is None else (effect.counted,)),
            values,
            released.staleness,
            SENT_BEFORE if effect.superseding else None,
        )
        with self.condition:
            self.arrivals[released.fragment] = arrival.after(self.arrivals.get(released.fragment))
            self.turns.append(released)

    def drop_arrivals(self) -> None:
        """What was delivered is of no use any more."""
        with self.condition:
            self.arrivals.clear()

    def reject(self, push_id: int, code: str, text: str) -> None:
        with self.condition:
            self.rejections[push_id] = Rejection(code, text)

    def answered(self, effect: Answered) -> None:
        with self.condition:
            self.results[effect.request] = effect

    def publish(self, session: Session, *, is_news: bool) -> None:
        """Let the training thread see how things stand now, and wake it up where that is news.

        Not for each chunk that comes or goes: while training waits for a version, it would wake up a
        thousand times to find nothing, and the I/O thread would wait for Python's lock as often.
        """
        connection = session.connection
        self.last_heard, self.retries = connection.last_heard, session.uploads.retries
        flights = [upload for upload in session.uploads if upload.is_gradient]
        uploaded = frozenset(each.push.push_id for each in flights if each.is_in)
        put_off = frozenset(each.push.push_id for each in flights if each.is_put_off)
        is_same = (self.phase, self.uploaded, self.put_off) == (session.phase, uploaded, put_off)
        if is_same and not is_news:
            return
        with self.condition:
            self.phase = session.phase
            self.terms = session.terms
            self.reconnections = connection.reconnections
            self.uploaded, self.put_off = uploaded, put_off
            self.condition.notify_all()

    def end(self) -> None:
        """The I/O thread is gone."""
        with self.condition:
            self.has_ended = True
            self.condition.notify_all()
