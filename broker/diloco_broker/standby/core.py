"""The state machine of a standby: it promises its hub not to take over, and decides when it does.

The standby renews its promise as long as it hears the hub. When the hub falls silent, the last promise
expires. Workers that have lost the hub connect to the standby and vote for it
(`diloco_worker.session.connection`). Once the promise has expired and a majority of the hub's workers
have voted, no lease of the hub can hold, and the standby takes over. `standby.lease` has the rules.

`now` is an argument, random numbers are handed in. Methods yield commands for the shell, in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from diloco_broker.core.effects import Route
from diloco_broker.standby.lease import SAFETY, Ballot, majority
from diloco_protocol import messages
from diloco_protocol.errors import Code

# Seconds between two greetings while the hub is silent.
GREET_S = 0.5
# In lease lengths: silence after which the hub counts as lost. It sends three messages in a lease.
LOST_AFTER = 0.7
# Seconds between two requests for the votes of waiting workers.
ASK_S = 0.2
# In lease lengths: a worker that has waited this long is sent to check whether it can reach the hub.
STAYS_FOR = 4.0
# Seconds of silence after which a worker no longer waits; it sends a join every second.
GONE_AFTER_S = 5.0
# Seconds until the next attempt after a takeover could not be recorded on disk.
RETRY_S = 1.0
# Seconds that the hub has to finish its round and save before a planned takeover; then it goes ahead.
SETTLES_WITHIN_S = 60.0
# Waiting workers, and relays, that are remembered.
MOST_WAITING = 10_000
_FORCED = "An operator declared the hub gone."


@dataclass(frozen=True)
class SendToHub:
    """Send the hub a message."""

    message: messages.Message


@dataclass(frozen=True)
class Send:
    """Send a message on a connection that is not the hub's."""

    route: Route
    message: messages.Message


@dataclass(frozen=True)
class FollowSettings:
    """Adopt the settings of the run that operators have changed at the hub."""

    settings: Mapping[str, Any]


@dataclass(frozen=True)
class TakeOver:
    """Become the run's broker, with this term. `why` is a sentence."""

    term: int
    why: str


@dataclass(frozen=True)
class Log:
    text: str
    is_warning: bool = False


Command = SendToHub | Send | FollowSettings | TakeOver | Log
Commands = Iterator[Command]


@dataclass
class Waiting:
    """A worker that waits here because it cannot join the hub."""

    since: float
    heard_at: float


class Standby:
    """The core of a standby; see the module's docstring.

    Args:
        name: its permanent name, which the hub remembers.
        hub: the hub's address, for messages.
        draw: returns an unpredictable number below 2**64.
        now: seconds of the machine's clock, as in every later call.

    Attributes:
        saved: the number of the newest checkpoint that was copied from the hub; None without one.
        misfit: why that cannot be resumed with the standby's options, a sentence; None if it can.
    """

    saved: int | None = None
    misfit: str | None = None
    term: int | None = None  # the hub's; None before its first message
    is_over = False  # it has taken over
    _wanted_at: float | None = None  # when an operator asked for a takeover
    _wants = ""
    _refused = ""  # the hub's last error
    _is_forced = False

    def __init__(self, name: str, hub: str, draw: Callable[[], int], now: float) -> None:
        self.name, self.hub = name, hub
        self.ballot = Ballot(draw, 0.0)  # gets the length of the hub's lease
        self.waiting: dict[Route, Waiting] = {}
        self.relays: dict[Route, float] = {}  # when each was last heard
        self.settings: Mapping[str, Any] = {}  # the hub's
        self._draw, self._incarnation = draw, draw()
        self._began_at = self._greets_at = now
        self._asks_at = self._heard_at = self._promised_until = self._again_at = -math.inf

    # The hub.

    def receive_from_hub(self, message: messages.Message, now: float) -> Commands:
        """Handle a message of the hub."""
        match message:
            case messages.Lease() if message.incarnation == self._incarnation:
                yield from self._renew(message, now)
            case messages.Error(text=text) if text != self._refused:
                self._refused = text
                yield Log(f"The hub at {self.hub} rejects this standby: {text}", is_warning=True)

    def _renew(self, lease: messages.Lease, now: float) -> Commands:
        if self.is_over or lease.term < (self.term or 0):
            return
        if self.term is None:  # an earlier incarnation may have made a promise
            self._promised_until = now + SAFETY * lease.seconds
            yield Log(f"Connected to the hub at {self.hub}; the lease is {lease.seconds:g} s.")
        elif not self.hears(now):
            yield Log("The hub is reachable again.")
        self.term, self._heard_at = lease.term, now
        if lease.seconds != self.ballot.seconds:  # earlier votes were for another length
            self.ballot = Ballot(self.ballot.draw, lease.seconds, self.ballot.voters)
        if lease.voters:
            self.ballot.voters = frozenset(lease.voters)
        if lease.settings != self.settings:
            self.settings = lease.settings
            yield FollowSettings(lease.settings)
        if lease.is_over:
            yield from self._take_over("The hub has stepped down.", now)
            return
        self._wants = self._want(lease, now)
        if self._wants == "charge":
            yield self._promise()
        else:
            self._promised_until = max(self._promised_until, now + SAFETY * lease.seconds)
            yield self._promise(lease.nonce)

    def _promise(self, nonce: int | None = None) -> SendToHub:
        return SendToHub(messages.Promise(self.name, self._incarnation, nonce, self._wants))

    def _want(self, lease: messages.Lease, now: float) -> str:
        if self._wanted_at is None or self.misfit is not None:
            return ""
        has_all = lease.settled is not None and (self.saved or 0) >= lease.settled
        return "charge" if has_all or now >= self._wanted_at + SETTLES_WITHIN_S else "hold"

    def hub_lost(self) -> None:
        """The connection to the hub broke."""
        self._heard_at = -math.inf

    def hears(self, now: float) -> bool:
        """Whether the hub is reachable."""
        return now - self._heard_at < LOST_AFTER * self.ballot.seconds

    # Workers and operators.

    def receive(self, route: Route, message: messages.Message, now: float) -> Commands:
        """Handle a message of a worker, a relay or an operator."""
        match message:
            case messages.Join():
                yield from self._joins(route, now)
            case messages.Attach(token=None):
                yield self._attaches(route, now)
            case messages.Attach() | messages.Probe() if route in self.relays:
                self.relays[route] = now
            case messages.Vote(voter=voter, nonce=nonce):
                at, worker = self.ballot.drawn_at(nonce), self.waiting.get(route)
                if at is not None and worker is not None:
                    worker.heard_at = now
                    self.ballot.vote(voter, at)
            case messages.Control(action="status", request=request):
                said = self.situation(now)
                yield Send(route, messages.Result(request, True, said, self.data(now)))
            case messages.Control(action="promote", request=request):
                force = message.arguments.get("force", False)
                ok, text = self._promote(force, now)
                is_over = {"is_over": bool(force)} if ok else {}
                yield Send(route, messages.Result(request, ok, text, is_over))
                if ok and force:
                    yield from self._take_over(_FORCED, now)
            case messages.Control(action=action, request=request):
                text = (
                    f"A standby only answers status and promote; send {action!r:.60} to {self.hub}."
                )
                yield Send(route, messages.Result(request, False, text))
            case _:
                yield self._refusal(route, message.kind)

    def _refusal(self, route: Route, kind: str) -> Send:
        text = f"This is the standby of {self.hub}, which has the run."
        return Send(route, messages.Error(Code.STANDBY, text, retry=True, about=kind))

    def _attaches(self, route: Route, now: float) -> Send:
        """Accept a relay, whose workers may wait and vote here while the hub is lost."""
        if self.term is None or self.hears(now) or len(self.relays) >= MOST_WAITING:
            return self._refusal(route, "attach")
        self.relays[route] = now
        token = self._draw().to_bytes(8, "big")
        return Send(route, messages.Attached(token, combines=False, wire_dtype="fp32"))

    def _joins(self, route: Route, now: float) -> Commands:
        worker = self.waiting.get(route)
        has_stayed = worker is not None and now - worker.since > STAYS_FOR * self.ballot.seconds
        is_full = worker is None and len(self.waiting) >= MOST_WAITING
        if self.term is None or self.hears(now) or has_stayed or is_full:
            self.waiting.pop(route, None)
            yield self._refusal(route, "join")
            return
        if worker is None:  # repeated joins get no further request
            self.waiting[route] = worker = Waiting(now, now)
            yield self._asks(route, self.ballot.nonce(now))
        worker.heard_at = now
        text = f"{self.situation(now)} Stay here."
        yield Send(route, messages.Error(Code.NO_MODEL, text, retry=True, about="join"))

    def _asks(self, route: Route, nonce: int) -> Send:
        notice = messages.Notice("standby", nonce=nonce, seconds=self.ballot.seconds)
        return Send(route, notice)

    # Taking over.

    def tick(self, now: float) -> Commands:
        """Greet a silent hub, ask for votes, and take over if that is allowed."""
        if self.is_over:
            return
        if now >= self._greets_at and not self.hears(now):
            self._greets_at = now + GREET_S
            yield self._promise()
        self.waiting = {r: w for r, w in self.waiting.items() if now - w.heard_at < GONE_AFTER_S}
        self.relays = {r: at for r, at in self.relays.items() if now - at < GONE_AFTER_S}
        if self._is_forced:
            yield from self._take_over(_FORCED, now)
            return
        if self.term is None or self.hears(now):
            return
        if now >= self._asks_at and self.waiting:
            self._asks_at, nonce = now + ASK_S, self.ballot.nonce(now)
            for route in self.waiting:
                yield self._asks(route, nonce)
        has_majority = self.ballot.supported_at >= now - self.ballot.seconds
        if now >= self._promised_until and has_majority:
            here, of = self._counted(now)
            why = f"The hub is lost, and {here} of its {of} workers voted for this standby."
            yield from self._take_over(why, now)

    def _take_over(self, why: str, now: float) -> Commands:
        if self.misfit is None and now >= self._again_at:
            self.is_over = True
            yield TakeOver((self.term or 0) + 1, why)

    def cannot_take_over(self, now: float) -> None:
        """The takeover could not be recorded on disk: stay a standby, and retry."""
        self.is_over, self._again_at = False, now + RETRY_S

    def _counted(self, now: float) -> tuple[int, int]:
        """The number of valid votes of the hub's workers, and the number of these workers."""
        return self.ballot.votes_since(now - self.ballot.seconds), len(self.ballot.voters)

    def _promote(self, force: object, now: float) -> tuple[bool, str]:
        """An operator requests a takeover. Returns whether it is possible, and the answer."""
        if not isinstance(force, bool):
            return False, f"force must be true or false, got {force!r:.40}."
        if self.misfit is not None:
            return False, f"This standby cannot take over: {self.misfit}"
        if force:
            self._is_forced = True
            return True, "Taking over, forced by the operator."
        if self._wanted_at is None:
            self._wanted_at = now
        text = self.situation(now)
        if not self.hears(now):
            text += " promote --force does it at once; use it only if the hub will not come back."
        return True, text

    # Status.

    def situation(self, now: float) -> str:
        """The state of the takeover, in sentences."""
        cannot = "" if self.misfit is None else f" This standby cannot take over: {self.misfit}"
        return self._stands(now) + cannot

    def _stands(self, now: float) -> str:
        if self.term is None:
            waits = now - self._began_at
            return f"This standby has been waiting {waits:.0f} s for its hub at {self.hub}."
        if self.hears(now):
            if self._wanted_at is None:
                return f"This is the standby of {self.hub}, which has the run."
            return (
                f"The hub at {self.hub} finishes its round and saves; then the standby takes over."
            )
        here, of = self._counted(now)
        if not of:
            return (
                f"The hub at {self.hub} is unreachable and had no workers. If it will not come back, "
                "use promote --force."
            )
        until = self._promised_until - now
        soon = f"in {until:.1f} s at the earliest, " if until > 0 else ""
        return (
            f"The hub at {self.hub} is unreachable. The standby takes over {soon}once {majority(of)} "
            f"of its {of} workers have voted for it; {here} {'has' if here == 1 else 'have'}."
        )

    def data(self, now: float) -> dict[str, Any]:
        """The same as JSON-compatible values."""
        here, of = self._counted(now)
        return {
            "standby": self.name,
            "hub": self.hub,
            "term": self.term,
            "hears_hub": self.term is not None and self.hears(now),
            "lease_s": self.ballot.seconds,
            "checkpoint": self.saved,
            "misfit": self.misfit,
            "voters": of,
            "votes": here,
        }
