"""What an operator has told all workers to do, and who has done it."""

from __future__ import annotations

from dataclasses import dataclass, field

from diloco_protocol.messages import MOST_BEHIND, Reply

# Names of workers that have answered; more are not noted, so that those who come and go cost nothing.
MOST_NAMES = 1000


@dataclass
class Order:
    """`save_all` or `stop_all`. Workers that come while it is pending get it, too.

    A relay has answered once all that are behind it have; what they did stands under their own names.
    """

    number: int
    text: str  # what the workers are told
    until: float  # when those that have not answered are not waited for any longer
    is_given_up: bool = False
    waiting: set[str] = field(default_factory=set)
    saved: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)
    # By relay in `waiting`, those behind it that have not answered, where it has told of them.
    behind: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def is_pending(self) -> bool:
        """Does it concern workers that come now?"""
        return bool(self.waiting) and not self.is_given_up

    @property
    def unanswered(self) -> list[str]:
        """Who has not answered, those behind relays by their own names."""
        here = self.waiting - self.behind.keys()
        return sorted(
            here.union(*(self.behind[name] for name in self.waiting & self.behind.keys()))
        )

    def settle(self, worker_id: str, *, is_gone: bool) -> None:
        """A worker has done it, or is gone."""
        self.waiting.discard(worker_id)
        self.behind.pop(worker_id, None)
        answered = self.left if is_gone else self.saved
        if len(answered) < MOST_NAMES:
            answered.add(worker_id)

    def tells(self, relay: str, reply: Reply) -> None:
        """How those behind a relay stand with it. Once all have answered, the relay has."""
        for found, names in ((self.saved, reply.saved), (self.left, reply.left)):
            found.update(names[: max(0, min(MOST_BEHIND, MOST_NAMES - len(found)))])
        self.left -= self.saved | set(reply.waiting)
        if reply.waiting:
            self.behind[relay] = reply.waiting[:MOST_BEHIND]
        else:
            self.behind.pop(relay, None)
            self.waiting.discard(relay)
