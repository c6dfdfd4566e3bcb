"""What the training thread tells the I/O thread of itself, for heartbeats."""

from __future__ import annotations

from dataclasses import dataclass

from diloco_protocol.messages import Heartbeat

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
