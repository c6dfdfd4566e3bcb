"""The results of a link for the training thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from diloco_protocol import Refused
from diloco_protocol.data.spans import Spans
from diloco_protocol.messages import Notice, Progress, Welcome
from diloco_worker.session import effects
from diloco_worker.session.compatibility import OnTerms
from diloco_worker.session.connection import Phase
from diloco_worker.session.news import Arrival, LinkState, News, Rejection, Turning
from diloco_worker.session.previous_incarnation import SENT_BEFORE
from diloco_worker.session.session import Session

# Seconds until a signal is handled that arrived just before a wait began.
SIGNALS_WITHIN_S = 1.0


class Inbox(OnTerms):
    """Attributes are to be read under `condition`, or where a short lag does no harm.

    Changes of counters and `last_heard` do not wake waiting threads. `follows_rounds`: keep `turns`.
    """

    def __init__(self, *, follows_rounds: bool = True) -> None:
        self.condition = threading.Condition()
        # Of the session.
        self.phase = Phase.NEW
        self.last_heard: float | None = None
        self.reconnections = 0
        self.retries = 0
        self.uploaded: frozenset[int] = frozenset()  # pushes of which the broker has all chunks
        self.put_off: frozenset[int] = frozenset()  # pushes that the broker does not accept yet
        # From the broker.
        self.feed: str | None = None  # the address of its feed
        # Index and count of this worker's share of the data, from the first welcome.
        self.shard: tuple[int, int] | None = None
        self.refusal: Refused | None = None  # why it refuses this worker
        self.refused_for_good = False  # at joining
        self.stopping: str | None = None  # why this worker should end
        self.save_order = 0  # the number of the newest request to save
        self.restarting: str | None = None  # it announced a restart; None once it is back
        self.sync_every: int | None = None  # its H for this worker (Dynamic Local Updates)
        self.run_progress = Progress()  # of the run, with the newest version
        self.run_loss: float | None = None  # the newest mean of all workers
        # Waiting to be taken.
        self.arrivals: dict[int, Arrival] = {}  # complete versions, by fragment
        self.rejections: dict[int, Rejection] = {}  # dropped pushes, by push id
        # Messages about rounds, in the order of arrival.
        self.turns: deque[Turning] = deque(maxlen=None if follows_rounds else 0)
        self.results: dict[int, effects.Answered] = {}  # answers to control actions, by request
        # By data set, units that must not be trained on any more, though samples of them may come.
        self.dropped_units: Mapping[str, Spans] = {}
        # Of the link.
        self.bytes_up = 0
        self.bytes_down = 0
        self.last_error: str | None = None  # the last thing that went wrong, a sentence
        self.has_forgotten = False  # the checkpoint did not fit the run, and was discarded
        self.has_ended = False  # the I/O thread is gone
        self.is_news = False  # something happened since the last `publish`

    # For the training thread.

    @property
    def has_news(self) -> bool:
        """Whether `arrivals` or `rejections` has something; cheap."""
        return bool(self.arrivals or self.rejections)

    def take(self, fragment: int) -> Arrival | None:
        """Take the complete version of a fragment that has arrived."""
        with self.condition:
            return self.arrivals.pop(fragment, None)

    def take_all(self) -> dict[int, Arrival] | None:
        """Take a complete version of each fragment; None while one is missing."""
        with self.condition:
            layout, arrivals = self.layout, self.arrivals
            if layout is None or any(p.fragment not in arrivals for p in layout.all if p.chunks):
                return None
            self.arrivals = {}
            return arrivals

    def take_news(self) -> News:
        """Take all that arrived since the last call."""
        with self.condition:
            news = News(tuple(self.turns), dict(self.arrivals), dict(self.rejections))
            self.turns.clear()
            self.arrivals.clear()
            self.rejections.clear()
            return news

    def state(self, silence: float | None, **known: Any) -> LinkState:
        """The state of the link: as far as it is known here, and what the caller knows besides."""
        assert self.config is not None
        return LinkState(
            config=self.config,
            sync_every=self.sync_every,
            phase=self.phase,
            reconnections=self.reconnections,
            uploaded=self.uploaded,
            put_off=self.put_off,
            has_ended=self.has_ended,
            over=self.stopping,
            is_restarting=self.restarting is not None,
            refusal=None if self.refusal is None else str(self.refusal),
            last_error=self.last_error,
            silence=silence,
            **known,
        )

    def take_rejection(self, push_id: int) -> Rejection | None:
        with self.condition:
            return self.rejections.pop(push_id, None)

    def wait_for(self, what: Callable[[], bool], timeout: float) -> bool:
        """Wait until `what` is true or the I/O thread has ended, at most `timeout` seconds.

        It waits a second at a time, since a signal that arrives just before a wait does not end it.
        """
        until = time.monotonic() + timeout
        with self.condition:
            while not (what() or self.has_ended):
                left = until - time.monotonic()
                if left <= 0:
                    return False
                self.condition.wait(min(left, SIGNALS_WITHIN_S))
            return what()

    # For the I/O thread.

    def take_in(  # noqa: C901  a case for each effect
        self, effect: effects.Effect, values: Any = None
    ) -> None:
        """Take in an effect. `values`: of a delivered version, where a copy of them is kept."""
        with self.condition:
            self.is_news = True
            match effect:
                case effects.Told(Welcome() as welcome):  # voids earlier notices
                    self.refusal = self.stopping = self.restarting = None
                    self.feed = welcome.feed
                    self.shard = self.shard or _shard(welcome)
                    self.turns.clear()
                    self.turns.append(welcome)
                case effects.JoinRefused(code, text, final):
                    self.refusal, self.refused_for_good = Refused(code, text), final
                case effects.Deliver():
                    self._deliver(effect, values)
                case effects.PushOver(push_id, code, text, counted) if code is not None:
                    self.rejections[push_id] = Rejection(code, text, counted)
                case effects.DropParts():
                    self.arrivals.clear()
                case effects.ForgetCheckpoint():
                    self.has_forgotten = True
                case effects.Answered(request):
                    self.results[request] = effect
                case effects.Told(Notice("alive", sync_every=sync_every)):
                    self.sync_every = sync_every
                case effects.Told(Notice("shutdown" | "kicked", text)):
                    self.stopping = text
                case effects.Told(Notice("restarting", text)):
                    self.restarting = text
                case effects.Told(Notice("save_all", round=number)):
                    self.save_order = number
                case effects.Told(message):  # a grant, or a deferred push
                    self.turns.append(message)

    def _deliver(self, effect: effects.Deliver, values: Any) -> None:
        released = effect.released
        if released.progress is not None:
            self.run_progress = released.progress
        if released.loss is not None:
            self.run_loss = released.loss
        arrival = Arrival(
            released,
            frozenset(() if effect.counted is None else (effect.counted,)),
            values,
            released.staleness,
            SENT_BEFORE if effect.superseding else None,
        )
        self.arrivals[released.fragment] = arrival.after(self.arrivals.get(released.fragment))
        self.turns.append(released)

    def publish(self, session: Session) -> None:
        """Publish the state of the session, and wake waiting threads where that is news.

        Not for each chunk: a thread that waits for a version would wake a thousand times in vain.
        """
        connection = session.connection
        self.last_heard, self.retries = connection.last_heard, session.uploads.retries
        self.dropped_units = session.units.dropped
        pushes_in_flight = [upload for upload in session.uploads if upload.is_gradient]
        uploaded = frozenset(each.push.push_id for each in pushes_in_flight if each.is_in)
        put_off = frozenset(each.push.push_id for each in pushes_in_flight if each.is_put_off)
        is_same = (self.phase, self.uploaded, self.put_off) == (session.phase, uploaded, put_off)
        if is_same and not self.is_news:
            return
        with self.condition:
            self.is_news = False
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


def _shard(welcome: Welcome) -> tuple[int, int] | None:
    index, count = welcome.shard, welcome.num_shards
    return None if index is None or count is None else (index, count)
