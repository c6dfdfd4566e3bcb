"""What the training loop tells of itself: loss, counts, pace; gathered without slowing it down."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from diloco_protocol import UsageError
from diloco_worker.core.sync.news import Work

# Seconds between two looks at a loss that lies on an accelerator: each look waits for its kernels.
LOOK_S = 5.0
# Weight of the newest step in the moving average of the pace: about the last twenty steps.
PACE_WEIGHT = 0.05


class Reports:
    """The latest loss, and the tokens and samples so far.

    Values on the CPU are read at once. Values on an accelerator are kept as they are and read every few
    seconds and at boundaries, so that reporting does not make the host wait at each step.
    """

    def __init__(self) -> None:
        self.loss: float | None = None
        self.counts = {"tokens": 0, "samples": 0}
        self.extra: dict[str, Any] = {}
        self._pending: dict[str, Tensor] = {}  # on an accelerator, by the names of `add`
        self._read_at = 0.0

    @property
    def totals(self) -> Work:
        """What has been reported up to now, without the steps."""
        return Work(loss=self.loss, **self.counts)

    def add(
        self,
        loss: float | Tensor | None,
        tokens: int | Tensor | None,
        samples: int | Tensor | None,
        extra: dict[str, Any],
    ) -> None:
        """Take up a report; raises UsageError for a tensor that is not a single value."""
        given = {"loss": loss, "tokens": tokens, "samples": samples}
        for name, value in given.items():
            if isinstance(value, Tensor) and value.numel() != 1:
                raise UsageError(
                    f"report({name}=...) got a tensor of shape {list(value.shape)}; "
                    "give a single value, such as its mean or sum."
                )
        if loss is not None:
            self._pending.pop("loss", None)  # counts add up, of losses the last one stays
        for name, value in given.items():
            if isinstance(value, Tensor) and value.device.type != "cpu":
                new, earlier = value.detach(), self._pending.get(name)
                self._pending[name] = new.clone() if earlier is None else earlier + new
            elif value is not None:
                self._take(name, value)
        self.extra.update(extra)

    def _take(self, name: str, value: float | Tensor) -> None:
        if name == "loss":
            self.loss = float(value.detach() if isinstance(value, Tensor) else value)
        else:
            self.counts[name] += int(value)

    def read(self, now: float, *, at_once: bool = False) -> None:
        """Bring loss and counts up to date if it is time to."""
        if not at_once and now - self._read_at < LOOK_S:
            return
        self._read_at = now
        for name, value in self._pending.items():
            self._take(name, value)
        self._pending.clear()


class Pace:
    """Optimizer steps per second of training time, as a moving average."""

    def __init__(self) -> None:
        self._seconds: float | None = None
        self._left_at: float | None = None

    def step(self, now: float) -> None:
        """A step has ended; the time since `resume` was training."""
        if self._left_at is not None:
            took = now - self._left_at
            if self._seconds is None:
                self._seconds = took
            else:
                self._seconds += PACE_WEIGHT * (took - self._seconds)

    def resume(self, now: float) -> None:
        """Training goes on; what came before was not training."""
        self._left_at = now

    def leave_out(self, seconds: float) -> None:
        """Between two steps, so long was no training."""
        if self._left_at is not None:
            self._left_at += seconds

    @property
    def steps_per_s(self) -> float | None:
        return 1 / self._seconds if self._seconds else None
