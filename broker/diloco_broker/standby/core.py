"""What a standby decides: whether it vouches for its hub, and when it takes over. Pure.

It promises its hub not to take over for a while, again and again. When it hears the hub no more, its
last promise runs out. Workers that hear the hub no more come to it, and each that may vote for it does
(`diloco_worker.session.connection`). Once the last promise is over and a majority of the hub's workers
are here at one time, no lease of the hub's can hold, and it takes over. `core.standby.lease` has the
other side.

`now` is an argument, random numbers are handed in. Methods yield commands for the shell, in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from diloco_broker.core.effects import Route
from diloco_broker.core.standby.lease import SAFETY
from diloco_broker.core.standby.voters import majority
from diloco_protocol import messages
from diloco_protocol.errors import Code

# Between two greetings while the hub is not heard.
GREET_S = 0.5
# The hub speaks three times in a lease; after so much of one without a word it is not heard.
UNHEARD_AFTER = 0.7
# How often those who are here are asked for their votes.
ASK_S = 0.2
# A worker that has stayed for so many leases is sent to look whether it hears the hub.
STAYS_FOR = 4.0
# Who has said nothing for so long is not here any more; a worker joins again every second.
GONE_AFTER_S = 5.0
# After a takeover that could not be written down, until the next attempt.
AGAIN_S = 1.0
# How long the hub has, before a planned takeover, to finish its round and save. Then it is done without.
SETTLES_WITHIN_S = 60.0
MOST_HERE = 10_000


@dataclass(frozen=True)
class ToHub:
    """Send the hub a message."""

    message: messages.Message


@dataclass(frozen=True)
class Answer:
    """Send a message to somebody who came here."""

    route: Route
    message: messages.Message


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


Command = ToHub | Answer | TakeOver | Say
Commands = Iterator[Command]


@dataclass
class Guest:
    """A worker that came here, since the hub does not let it in."""

    came_at: float
    heard_at: float
    asked_at: float = -math.inf
    stamps: dict[int, float] = field(default_factory=dict)  # that it was sent, and when


class Standby:
    """See the head of this module.

    Args:
        name: its name for good, which the hub remembers.
        hub: where that is, for people.
        draw: returns an unpredictable number below 2**64.
        now: seconds of the machine's clock, as in every later call.
        saved: returns the number of the newest checkpoint that it has of the hub; None without one.
        misfit: returns why it could not go on from that with its options, a sentence; None if it could.
    """

    def __init__(
        self,
        name: str,
        hub: str,
        draw: Callable[[], int],
        now: float,
        *,
        saved: Callable[[], int | None] = lambda: None,
        misfit: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.name, self.hub = name, hub
        self.term: int | None = None  # the hub's; None before it was heard
        self.seconds = 0.0  # of its lease
        self.is_over = False  # it has taken over
        self.guests: dict[Route, Guest] = {}
        self._draw, self._saved, self._misfit = draw, saved, misfit
        self._life = draw()
        self._began_at = self._greets_at = now
        self._asks_at = self._heard_at = -math.inf
        self._promised_until = -math.inf
        self._roster: tuple[int, frozenset[int]] | None = None  # number and voters
        self._votes: dict[int, float] = {}  # by voter, until when its vote counts
        self._wanted_at: float | None = None  # when somebody asked for a takeover
        self._wants = ""
        self._refused = ""  # what the hub said last
        self._is_forced = False
        self._again_at = -math.inf  # a takeover is not tried before
        self._term_before: int | None = None

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
        if self.term is None:
            yield Say(f"This is the standby of {self.hub}; the lease is {lease.seconds:g} s.")
        elif not self.hears(now):
            yield Say("The hub is heard again.")
        is_first = self.term is None
        self.term, self.seconds, self._heard_at = lease.term, lease.seconds, now
        if is_first:  # an earlier life may have promised something
            self._promised_until = now + SAFETY * lease.seconds
        if lease.voters is not None:
            self._roster = lease.roster, frozenset(lease.voters)
        if lease.is_over:
            yield from self._take_over("The hub has stepped down.", now)
            return
        self._wants = self._want(lease, now)
        if self._wants != "charge":
            self._promised_until = max(self._promised_until, now + SAFETY * lease.seconds)
        stamp = None if self._wants == "charge" else lease.stamp
        number = 0 if self._roster is None else self._roster[0]
        yield ToHub(messages.Promise(self.name, self._life, stamp, number, self._wants))

    def _want(self, lease: messages.Lease, now: float) -> str:
        if self._wanted_at is None or self._misfit() is not None:
            return ""
        saved = self._saved() or 0
        has_all = lease.settled is not None and saved >= lease.settled
        is_late = now >= self._wanted_at + SETTLES_WITHIN_S
        return "charge" if has_all or is_late else "hold"

    def hub_lost(self) -> None:
        """The connection to the hub broke."""
        self._heard_at = -math.inf

    def hears(self, now: float) -> bool:
        """Is the hub heard?"""
        return now - self._heard_at < UNHEARD_AFTER * self.seconds

    # Those who come here.

    def hears_guest(self, route: Route, message: messages.Message, now: float) -> Commands:
        """Somebody who is not the hub has sent a message."""
        match message:
            case messages.Join():
                yield from self._joins(route, now)
            case messages.Vote(voter=voter, stamp=stamp):
                self._votes_for_us(route, voter, stamp, now)
            case messages.Control(action="status", request=request):
                said, data = self.situation(now), self.data(now)
                yield Answer(route, messages.Result(request, True, said, data))
            case messages.Control(action="promote"):
                yield from self._promote(route, message, now)
            case messages.Control(action=action, request=request):
                text = (
                    "This is a standby, which knows status and promote. For "
                    f"{action!r:.60} ask the hub at {self.hub}."
                )
                yield Answer(route, messages.Result(request, False, text))
            case _:
                yield Answer(route, self._refusal(message.kind, now))

    def _refusal(self, kind: str, now: float) -> messages.Error:
        text = f"This is the standby of {self.hub}, which has the run."
        return messages.Error(Code.STANDBY, text, retry=True, about=kind)

    def _joins(self, route: Route, now: float) -> Commands:
        guest = self.guests.get(route)
        has_stayed = guest is not None and now - guest.came_at > STAYS_FOR * self.seconds
        if self.term is None or self.hears(now) or has_stayed:
            self.guests.pop(route, None)
            yield Answer(route, self._refusal("join", now))
            return
        if guest is None:
            if len(self.guests) >= MOST_HERE:
                yield Answer(route, self._refusal("join", now))
                return
            guest = self.guests[route] = Guest(now, now)
        guest.heard_at = now
        if now - guest.asked_at >= ASK_S:  # one that joins in a flood costs no more than another
            yield from self._ask(route, guest, now)
        text = f"{self.situation(now)} Stay here."
        yield Answer(route, messages.Error(Code.NO_MODEL, text, retry=True, about="join"))

    def _ask(self, route: Route, guest: Guest, now: float) -> Commands:
        """Ask for a vote, which counts from the moment of the stamp."""
        stamp, guest.asked_at = self._draw(), now
        guest.stamps = {s: at for s, at in guest.stamps.items() if now - at < self.seconds}
        guest.stamps[stamp] = now
        yield Answer(route, messages.Notice("standby", stamp=stamp, seconds=self.seconds))

    def _votes_for_us(self, route: Route, voter: int, stamp: int, now: float) -> None:
        guest = self.guests.get(route)
        at = None if guest is None else guest.stamps.get(stamp)
        if guest is None or at is None or self._roster is None or voter not in self._roster[1]:
            return
        guest.heard_at = now
        self._votes[voter] = max(at + self.seconds, self._votes.get(voter, -math.inf))

    # Taking over.

    def tick(self, now: float) -> Commands:
        """Time has passed."""
        if self.is_over:
            return
        if now >= self._greets_at and not self.hears(now):
            self._greets_at = now + GREET_S
            number = 0 if self._roster is None else self._roster[0]
            yield ToHub(messages.Promise(self.name, self._life, None, number, self._wants))
        self.guests = {r: g for r, g in self.guests.items() if now - g.heard_at < GONE_AFTER_S}
        if self._is_forced:
            yield from self._take_over("Somebody has said that the hub is gone.", now)
            return
        if self.term is None or self.hears(now):
            return
        if now >= self._asks_at:
            self._asks_at = now + ASK_S
            for route, guest in self.guests.items():
                if now - guest.asked_at >= ASK_S / 2:
                    yield from self._ask(route, guest, now)
        if now >= self._promised_until and self._has_majority(now):
            here, of = self._counted(now)
            yield from self._take_over(
                f"The hub is gone, and {here} of its {of} workers are here.", now
            )

    def _take_over(self, why: str, now: float) -> Commands:
        if self._misfit() is not None or now < self._again_at:
            return
        self._term_before = self.term
        self.is_over, self.term = True, (self.term or 0) + 1
        yield TakeOver(self.term, why)

    def cannot_take_over(self, now: float) -> None:
        """The takeover could not be written down: this stays a standby, and tries again."""
        self.is_over, self.term = False, self._term_before
        self._again_at = now + AGAIN_S

    def _counted(self, now: float) -> tuple[int, int]:
        """How many of the hub's workers have a vote here that counts, and how many there are."""
        if self._roster is None:
            return 0, 0
        _, voters = self._roster
        return sum(self._votes.get(voter, -math.inf) >= now for voter in voters), len(voters)

    def _has_majority(self, now: float) -> bool:
        here, of = self._counted(now)
        return of > 0 and here >= majority(of)

    def _promote(self, route: Route, asked: messages.Control, now: float) -> Commands:
        """Somebody wants this one to be the hub."""
        force = asked.arguments.get("force", False)
        if not isinstance(force, bool):
            text = f"force is {force!r:.40}; it must be true or false."
            yield Answer(route, messages.Result(asked.request, False, text))
            return
        if (misfit := self._misfit()) is not None:
            text = f"This standby cannot take over: {misfit}"
            yield Answer(route, messages.Result(asked.request, False, text))
            return
        if force:
            self._is_forced = True
            text = "This standby takes over, on the word that the hub is gone."
            yield Answer(route, messages.Result(asked.request, True, text, {"is_over": True}))
            yield from self._take_over("Somebody has said that the hub is gone.", now)
            return
        if self._wanted_at is None:
            self._wanted_at = now
        text = self.situation(now)
        if not self.hears(now):
            text += " With promote --force it does at once: only where the hub is gone for good."
        yield Answer(route, messages.Result(asked.request, True, text, {"is_over": False}))

    # For people.

    def situation(self, now: float) -> str:
        """How things stand, in some sentences."""
        misfit = self._misfit()
        cannot = "" if misfit is None else f" This standby cannot take over: {misfit}"
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
            "lease_s": self.seconds,
            "checkpoint": self._saved(),
            "misfit": self._misfit(),
            "voters": of,
            "votes": here,
        }
