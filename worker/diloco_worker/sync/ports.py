"""What a boundary needs of its process: the model, the link to the broker, the script and the log.

The hook's ports use real tensors and a real link (`diloco_worker.ports`), those of several ranks all of
their models (`group.ports`), those of tests and simulations neither.

Ports that take time are awaited. Those of a training thread block, so a boundary runs to its end
without being suspended (`finish`); a thread with several workers, or a simulation, suspends it.
"""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from diloco_protocol import VersionId
from diloco_protocol.messages import Push
from diloco_worker.session.events import Event
from diloco_worker.session.news import Poll, Work
from diloco_worker.sync.fragment import InFlight, Merge

T = TypeVar("T")


@dataclass(frozen=True)
class NonFinite:
    """A delta that cannot be sent: this parameter or buffer has NaN or infinity."""

    name: str
    is_buffer: bool = False


class MergeFailed(Exception):
    """The model could not be changed, because of `__cause__`; the merge is retried later."""


class Ports(Protocol):
    """What a boundary calls. A port may be interrupted (Ctrl-C): the next boundary resumes."""

    def clock(self) -> float:
        """Seconds, monotonic."""

    def draw(self) -> int:
        """A random number below 2**64, for a push id."""

    # The link.

    def has_news(self) -> bool:
        """Whether something arrived since the last poll."""

    def poll(self) -> Poll:
        """The arrivals since the last poll, and the state of the link."""

    async def wait(self, seconds: float) -> Poll:
        """Poll once something arrived or the link changed, after `seconds` at most."""

    def notify(self, event: Event) -> None:
        """Hand an event to the session."""

    def offer(self, in_flight: InFlight, *, is_new: bool) -> int:
        """Push a frozen delta. `is_new`: no earlier process has offered it.

        Returns how often the worker has rejoined so far.
        """

    # The model.

    def check_model(self) -> None:
        """Warn if the model's tensors changed."""

    async def freeze(self, push: Push) -> Push | NonFinite:
        """Freeze global minus local as the delta of this push. Returns the push with its norm."""

    def keep_anchor(self, fragment: int) -> None:
        """Record the model: training goes on with this fragment's delta in flight."""

    async def merge(self, fragment: int, merge: Merge, step: int) -> None:
        """Bring the model in line after this optimizer step.

        Raises:
            MergeFailed: it could not be changed; a part of it may have been (`merge.change`).
        """

    # The script, its displays and its log.

    def read_reports(self) -> Work:
        """The script's reports, including values on a device."""

    def show_waiting(self) -> None:
        """The next heartbeat says that training waits."""

    def beat(self) -> None:
        """Send a heartbeat now."""

    def log(self, text: str, *, is_warning: bool = False) -> None:
        """Write a line to the log."""

    def trouble(self, text: str, cause: BaseException | None = None) -> None:
        """Report a problem in the log and in `last_error`."""

    def push_ended(
        self, push_id: int, fragment: int, version: VersionId | None = None, why: str = ""
    ) -> None:
        """A push is in this version, or was dropped for a reason; for the audit log."""


def finish(steps: Coroutine[Any, Any, T]) -> T:
    """Run a boundary whose ports block; returns its result."""
    try:
        steps.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    steps.close()
    raise RuntimeError("a boundary was suspended by ports that must block")
