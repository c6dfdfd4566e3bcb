"""One update of asynchronous mode: a submission, or those of one grace window, applied to a fragment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from diloco_broker.core.state.submissions import Submission, Submissions, counted
from diloco_broker.core.state.update import CountedPush, Phase, Update
from diloco_protocol.bitmap import Bitmap


@dataclass
class AsyncUpdate(Update):
    """What is applied next. Which fragment it is about is settled when something is ready.

    Attributes:
        submissions: all there are.
        chosen: those that are being applied.
    """

    submissions: Submissions = field(default_factory=Submissions)
    chosen: tuple[Submission, ...] = ()

    @property
    def begun(self) -> set[str]:
        return {s.worker_id for s in self.chosen}

    @property
    def participating(self) -> set[str]:
        return {s.worker_id for s in self.submissions}

    @property
    def averaged(self) -> int:
        return len(self.begun)

    def apply(self, chosen: tuple[Submission, ...], size: int) -> None:
        """These, all of one fragment with so many chunks, are applied from now on."""
        self.phase = Phase.CLOSING
        self.chosen, self.fragment, self.size = chosen, chosen[0].push.fragment, size
        self.stepped = Bitmap(size)

    def counted(self) -> Iterator[CountedPush]:
        return counted(self.chosen)

    def check_invariants(self) -> None:
        assert bool(self.chosen) == (self.phase is Phase.CLOSING)
        assert all(s.is_whole and s.push.fragment == self.fragment for s in self.chosen)
