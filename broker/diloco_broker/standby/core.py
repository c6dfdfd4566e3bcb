"""What a standby decides: whether it vouches for its hub, and when it takes over. Pure.

It promises its hub not to take over for a while, again and again. When it hears the hub no more, its
last promise runs out. Workers that hear the hub no more come to it, and each that may vote for it does
(`diloco_worker.session.connection`). Once the last promise is over and a majority of the hub's workers
have voted, no lease of the hub's can hold, and it takes over. `standby.lease` has the rules.

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

# Between two greetings while the hub is not heard.
GREET_S = 0.5
# In lease lengths: silence after which the hub counts as lost. It speaks three times in a lease.
UNHEARD_AFTER = 0.7
# Seconds between two requests for the votes of the workers that are here.
ASK_S = 0.2
# In lease lengths: a worker that stayed for so long is sent to check whether it can reach the hub.
STAYS_FOR = 4.0
# Seconds of silence after which a worker is not here any more; it sends a join every second.
GONE_AFTER_S = 5.0
# After a takeover that could not be written down, until the next attempt.
AGAIN_S = 1.0
# How long the hub has, before a planned takeover, to finish its round and save. Then it is done without.
SETTLES_WITHIN_S = 60.0
MOST_HERE = 10_000
_FORCED = "An operator declared the hub gone."


@dataclass(frozen=True)
class ToHub:
    """Send the hub a message."""

    message: messages.Message


@dataclass(frozen=True)
class Answer:
    """Send a message to a connection that is not the hub's."""

    route: Route
    message: messages.Message


@dataclass(frozen=True)
class Follow:
    """Operators have changed settings of the run at the hub: go on with these."""

    settings: Mapping[str, Any]


@dataclass(frozen=True)
class TakeOver:
    """This is the run's broker from now on, with that term. `why` is a sentence."""

    term: int
    why: str


@dataclass(frozen=True)
class Say:
    """A sentence for people."""

    text: str
    is_trouble: bool = False


Command = ToHub | Answer | Follow | TakeOver | Say
Commands = Iterator[Command]


@dataclass
class Guest:
    """A worker that came here, since the hub does not let it in."""

    came_at: float
    heard_at: float


class Standby:
    """See the head of this module.

    Args:
        name: its name for good, which the hub remembers.
        hub: where that is, for people.
        draw: returns an unpredictable number below 2**64.
        now: seconds of the machine's clock, as in every later call.

    Attributes:
        saved: the number of the newest checkpoint that it has of the hub; None without one.
        misfit: why it could not go on from that with its options, a sentence; None if it could.
    """

    saved: int | None = None
    misfit: str | None = None
    term: int | None = None  # the hub's; None before it was heard
    is_over = False  # it has taken over
    _wanted_at: float | None = None  # when an operator asked for a takeover
    _wants = ""
    _refused = ""  # what the hub said last
    _is_forced = False

    def __init__(self, name: str, hub: str, draw: Callable[[], int], now: float) -> None:
        self.name, self.hub = name, hub
        self.ballot = Ballot(draw, 0.0)  # as long as the hub's lease, once that was heard
        self.guests: dict[Route, Guest] = {}
        self.relays: dict[Route, float] = {}  # and when each was heard
        self.settings: Mapping[str, Any] = {}  # the hub's
        self._draw, self._life = draw, draw()
        self._began_at = self._greets_at = now
        self._asks_at = self._heard_at = self._promised_until = self._again_at = -math.inf

    # The hub.

    def hears_hub(self, message: messages.Message, now: float) -> Commands:
        """A message came from the hub."""
        match message:
            case messages.Lease() if message.life == self._life:
                yield from self._hears_lease(message, now)
            case messages.Error(text=text) if text != self._refused:
                self._refused = text
                yield Say(f"The hub at {self.hub} refuses this standby: {text}", is_trouble=True)

    def _hears_lease(self, lease: messages.Lease, now: float) -> Commands:
        if self.is_over or lease.term < (self.term or 0):
            return
        if self.term is None:  # an earlier life may have promised something
            self._promised_until = now + SAFETY * lease.seconds
            yield Say(f"This is the standby of {self.hub}; the lease is {lease.seconds:g} s.")
        elif not self.hears(now):
            yield Say("The hub is heard again.")
        self.term, self._heard_at = lease.term, now
        if lease.seconds != self.ballot.seconds:  # earlier votes were for another length
            self.ballot = Ballot(self.ballot.draw, lease.seconds, self.ballot.voters)
        if lease.voters:
            self.ballot.voters = frozenset(lease.voters)
        if lease.settings != self.settings:
            self.settings = lease.settings
            yield Follow(lease.settings)
        if lease.is_over:
            yield from self._take_over("The hub has stepped down.", now)
            return
        self._wants = self._want(lease, now)
        if self._wants == "charge":
            yield self._promise()
        else:
            self._promised_until = max(self._promised_until, now + SAFETY * lease.seconds)
            yield self._promise(lease.nonce)

    def _promise(self, nonce: int | None = None) -> ToHub:
        return ToHub(messages.Promise(self.name, self._life, nonce, self._wants))

    def _want(self, lease: messages.Lease, now: float) -> str:
        if self._wanted_at is None or self.misfit is not None:
            return ""
        has_all = lease.settled is not None and (self.saved or 0) >= lease.settled
        return "charge" if has_all or now >= self._wanted_at + SETTLES_WITHIN_S else "hold"

    def hub_lost(self) -> None:
        """The connection to the hub broke."""
        self._heard_at = -math.inf

    def hears(self, now: float) -> bool:
        """Is the hub heard?"""
        return now - self._heard_at < UNHEARD_AFTER * self.ballot.seconds

    # Workers and operators.

    def hears_guest(self, route: Route, message: messages.Message, now: float) -> Commands:
        """A connection that is not the hub's sent a message."""
        match message:
            case messages.Join():
                yield from self._joins(route, now)
            case messages.Attach(token=None):
                yield self._attaches(route, now)
            case messages.Attach() | messages.Probe() if route in self.relays:
                self.relays[route] = now
            case messages.Vote(voter=voter, nonce=nonce):
                at, guest = self.ballot.drawn_at(nonce), self.guests.get(route)
                if at is not None and guest is not None:
                    guest.heard_at = now
                    self.ballot.vote(voter, at)
            case messages.Control(action="status", request=request):
                said = self.situation(now)
                yield Answer(route, messages.Result(request, True, said, self.data(now)))
            case messages.Control(action="promote", request=request):
                force = message.arguments.get("force", False)
                ok, text = self._promote(force, now)
                is_over = {"is_over": bool(force)} if ok else {}
                yield Answer(route, messages.Result(request, ok, text, is_over))
                if ok and force:
                    yield from self._take_over(_FORCED, now)
            case messages.Control(action=action, request=request):
                text = (
                    "This is a standby, which knows status and promote. For "
                    f"{action!r:.60} ask the hub at {self.hub}."
                )
                yield Answer(route, messages.Result(request, False, text))
            case _:
                yield self._refusal(route, message.kind)

    def _refusal(self, route: Route, kind: str) -> Answer:
        text = f"This is the standby of {self.hub}, which has the run."
        return Answer(route, messages.Error(Code.STANDBY, text, retry=True, about=kind))

    def _attaches(self, route: Route, now: float) -> Answer:
        """A relay comes, whose workers may join here and vote while the hub is not heard."""
        if self.term is None or self.hears(now) or len(self.relays) >= MOST_HERE:
            return self._refusal(route, "attach")
        self.relays[route] = now
        token = self._draw().to_bytes(8, "big")
        return Answer(route, messages.Attached(token, combines=False, wire_dtype="fp32"))

    def _joins(self, route: Route, now: float) -> Commands:
        guest = self.guests.get(route)
        has_stayed = guest is not None and now - guest.came_at > STAYS_FOR * self.ballot.seconds
        is_full = guest is None and len(self.guests) >= MOST_HERE
        if self.term is None or self.hears(now) or has_stayed or is_full:
            self.guests.pop(route, None)
            yield self._refusal(route, "join")
            return
        if guest is None:  # one that joins in a flood is asked no more often than another
            self.guests[route] = guest = Guest(now, now)
            yield self._asks(route, self.ballot.nonce(now))
        guest.heard_at = now
        text = f"{self.situation(now)} Stay here."
        yield Answer(route, messages.Error(Code.NO_MODEL, text, retry=True, about="join"))

    def _asks(self, route: Route, nonce: int) -> Answer:
        notice = messages.Notice("standby", nonce=nonce, seconds=self.ballot.seconds)
        return Answer(route, notice)

    # Taking over.

    def tick(self, now: float) -> Commands:
        """Time has passed."""
        if self.is_over:
            return
        if now >= self._greets_at and not self.hears(now):
            self._greets_at = now + GREET_S
            yield self._promise()
        self.guests = {r: g for r, g in self.guests.items() if now - g.heard_at < GONE_AFTER_S}
        self.relays = {r: at for r, at in self.relays.items() if now - at < GONE_AFTER_S}
        if self._is_forced:
            yield from self._take_over(_FORCED, now)
            return
        if self.term is None or self.hears(now):
            return
        if now >= self._asks_at and self.guests:
            self._asks_at, nonce = now + ASK_S, self.ballot.nonce(now)
            for route in self.guests:
                yield self._asks(route, nonce)
        has_majority = self.ballot.supported_at >= now - self.ballot.seconds
        if now >= self._promised_until and has_majority:
            here, of = self._counted(now)
            why = f"The hub is gone, and {here} of its {of} workers are here."
            yield from self._take_over(why, now)

    def _take_over(self, why: str, now: float) -> Commands:
        if self.misfit is None and now >= self._again_at:
            self.is_over = True
            yield TakeOver((self.term or 0) + 1, why)

    def cannot_take_over(self, now: float) -> None:
        """The takeover could not be written down: this stays a standby, and tries again."""
        self.is_over, self._again_at = False, now + AGAIN_S

    def _counted(self, now: float) -> tuple[int, int]:
        """How many of the hub's workers have a vote here that counts, and how many there are."""
        return self.ballot.votes_since(now - self.ballot.seconds), len(self.ballot.voters)

    def _promote(self, force: object, now: float) -> tuple[bool, str]:
        """An operator asks for a takeover. Returns whether it is possible, and the answer."""
        if not isinstance(force, bool):
            return False, f"force is {force!r:.40}; it must be true or false."
        if self.misfit is not None:
            return False, f"This standby cannot take over: {self.misfit}"
        if force:
            self._is_forced = True
            return True, "This standby takes over, on the word that the hub is gone."
        if self._wanted_at is None:
            self._wanted_at = now
        text = self.situation(now)
        if not self.hears(now):
            text += " With promote --force it does at once: only where the hub is gone for good."
        return True, text

    # For people.

    def situation(self, now: float) -> str:
        """How things stand, in some sentences."""
        cannot = "" if self.misfit is None else f" This standby cannot take over: {self.misfit}"
        return self._stands(now) + cannot

    def _stands(self, now: float) -> str:
        if self.term is None:
            waits = now - self._began_at
            return f"This standby has not heard its hub at {self.hub} yet, for {waits:.0f} s."
        if self.hears(now):
            if self._wanted_at is None:
                return f"This is the standby of {self.hub}, which has the run."
            return (
                f"The hub at {self.hub} finishes its round and saves; then this standby takes over."
            )
        here, of = self._counted(now)
        if not of:
            return (
                f"The hub at {self.hub} is not heard, and had no workers. If it is gone for good, say "
                "so: promote --force."
            )
        until = self._promised_until - now
        soon = f"in {until:.1f} s at the soonest, and " if until > 0 else ""
        return (
            f"The hub at {self.hub} is not heard. This standby takes over {soon}once {majority(of)} of "
            f"its {of} workers are here; {here} of them {'is' if here == 1 else 'are'}."
        )

    def data(self, now: float) -> dict[str, Any]:
        """The same for programs."""
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
