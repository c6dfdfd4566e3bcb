"""The script's reports, loss and counts, gathered without slowing down the training loop."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from torch import Tensor

from diloco_protocol import UsageError
from diloco_protocol.ranges import MOST
from diloco_worker.session.news import Work

logger = logging.getLogger("diloco.worker")

# Seconds between two reads of a loss on an accelerator, which wait for its kernels.
LOOK_S = 5.0


class Reports:
    """The latest loss, and the tokens and samples so far.

    Values on the CPU are read at once. Values on an accelerator are kept and read every few seconds and
    at boundaries, so that a report does not wait for its kernels. A loss may be NaN or infinite; a
    count may not.
    """

    def __init__(self) -> None:
        self.loss: float | None = None
        self.counts = {"tokens": 0, "samples": 0}
        self.problem: str | None = None  # why a value on an accelerator was dropped, a sentence
        self.pending: dict[str, Tensor] = {}  # on an accelerator, by the names of `add`
        self._read_at = 0.0

    @property
    def totals(self) -> Work:
        """All reports so far, without the steps."""
        return Work(loss=self.loss, **self.counts)

    def add(
        self, loss: float | Tensor | None, tokens: int | Tensor | None, samples: int | Tensor | None
    ) -> None:
        """Take a report; raises UsageError for an invalid value, and changes nothing then."""
        every = {"loss": loss, "tokens": tokens, "samples": samples}
        given: dict[str, object] = {n: value for n, value in every.items() if value is not None}
        later: dict[str, Tensor] = {}
        now: dict[str, float] = {}
        for name, value in given.items():
            if isinstance(value, Tensor) and _is_on_accelerator(name, value):
                later[name] = value.detach()
            else:
                now[name] = self._read(name, value)
        if "loss" in given:
            self.pending.pop("loss", None)  # counts add up, of losses the last one stays
        self._take(now)
        for name, new in later.items():
            earlier = self.pending.get(name)
            self.pending[name] = new.clone() if earlier is None else earlier + new

    def _read(self, name: str, value: object) -> float:
        """A loss, or the total of a count with this value; raises UsageError."""
        number = _number(name, value)
        if name == "loss":
            return number
        if number < 0 or (isinstance(number, float) and not math.isfinite(number)):
            raise UsageError(
                f"report({name}=...) must be finite and not negative, got {max(number, -MOST):g}."
            )
        total = self.counts[name] + int(number)
        if total > MOST:
            raise UsageError(
                f"report({name}=...) makes more than 2**53 - 1 {name} in all; give those of one step."
            )
        return total

    def _take(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if name == "loss":
                self.loss = float(value)
            else:
                self.counts[name] = int(value)

    def read(self, now: float, *, at_once: bool = False) -> None:
        """Read pending values if it is time to. Invalid ones are dropped."""
        if not at_once and now - self._read_at < LOOK_S:
            return
        self._read_at = now
        pending, self.pending = self.pending, {}
        for name, value in pending.items():
            try:
                self._take({name: self._read(name, value)})
            except UsageError as error:
                if self.problem is None:
                    logger.warning("%s", error)
                self.problem = str(error)


def _is_on_accelerator(name: str, value: Tensor) -> bool:
    """Raises UsageError for a tensor that is not a single real number."""
    if value.numel() != 1:
        raise UsageError(
            f"report({name}=...) got a tensor of shape {list(value.shape)}; "
            "give a single value, such as its mean or sum."
        )
    if value.is_complex() or value.is_meta:
        raise UsageError(f"report({name}=...) got a tensor that holds no real number.")
    return value.device.type != "cpu"


def _number(name: str, value: Any) -> float:
    """The number in a scalar of Python, torch or NumPy; raises UsageError."""
    try:
        number = value.item() if hasattr(value, "item") else value
        if isinstance(number, int) and name != "loss":
            return number
        if isinstance(number, Real):
            return float(number)
    except (TypeError, ValueError, OverflowError):
        pass
    raise UsageError(f"report({name}=...) got a {type(value).__name__}; give a single real number.")
