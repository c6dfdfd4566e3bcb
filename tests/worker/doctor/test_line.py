"""The rate that the doctor measures is about that of the link."""

from collections import deque
from itertools import product
from typing import Any

import pytest

from diloco_protocol.messages import Probe
from diloco_worker.doctor import line
from kit.process_kit import PATIENCE_S

RATE, DELAY_S = 4e6, 0.02  # bytes a second, seconds each way
HEADER = 40  # approximate bytes of a probe without its buffer


class Line:
    """A broker that answers probes at once, over a link of this rate and delay, with simulated time.

    It replaces the module `time` and the dealer.
    """

    def __init__(self, rate: float, delay_s: float) -> None:
        self.rate, self.delay_s = rate, delay_s
        self.now = 0.0
        self._free_at = {"up": 0.0, "down": 0.0}
        self._answers: deque[tuple[float, Probe]] = deque()

    def monotonic(self) -> float:
        return self.now

    def _carry(self, way: str, size: int, at: float) -> float:
        """When these bytes are delivered if they are ready at that time."""
        self._free_at[way] = max(at, self._free_at[way]) + size / self.rate
        return self._free_at[way] + self.delay_s

    def send(self, probe: Probe, filling: bytes | None = None) -> None:
        at = self._carry("up", HEADER + len(filling or b""), self.now)
        self._answers.append((self._carry("down", HEADER + probe.answer, at), probe))

    def receive(self, until: float) -> tuple[Probe, None] | None:
        if not self._answers or self._answers[0][0] > until:
            self.now = until
            return None
        at, probe = self._answers.popleft()
        self.now = max(self.now, at)
        return probe, None


@pytest.mark.parametrize(
    ("rate", "delay_s"), [*product([1e5, RATE, 3e7], [0.0001, DELAY_S]), (125e6, 0.01)]
)
def test_rate_is_that_of_link(monkeypatch: pytest.MonkeyPatch, rate: float, delay_s: float) -> None:
    for measure in (line.rate_up, line.rate_down):
        made: Any = Line(rate, delay_s)
        monkeypatch.setattr(line, "time", made)
        trips = line.round_trips(made, PATIENCE_S)
        assert trips.median == pytest.approx(2 * (delay_s + HEADER / rate))
        found = measure(made, trips)
        assert found.bytes_per_s == pytest.approx(rate, rel=0.1)
        assert not found.is_at_least


@pytest.mark.parametrize("delay_s", [0.05, 0.15, 0.3, 0.6])
def test_rate_of_an_idle_link_is_a_bound(monkeypatch: pytest.MonkeyPatch, delay_s: float) -> None:
    for measure in (line.rate_up, line.rate_down):
        made: Any = Line(125e6, delay_s)
        monkeypatch.setattr(line, "time", made)
        found = measure(made, line.round_trips(made, PATIENCE_S))
        assert found.bytes_per_s <= 125e6
        assert found.is_at_least


def test_few_answers_are_enough_and_a_pause_changes_nothing() -> None:
    steady = [0.01 * number for number in range(101)]
    paused = [each + (6.0 if number > 60 else 0.0) for number, each in enumerate(steady)]
    assert line.answers_a_second(steady) == pytest.approx(100.0)
    assert line.answers_a_second(paused) == pytest.approx(100.0)
    assert line.answers_a_second([0.0, 2.0]) == pytest.approx(0.5)
    assert line.answers_a_second([0.0, 2.0, 4.0, 6.0]) == pytest.approx(0.5)
