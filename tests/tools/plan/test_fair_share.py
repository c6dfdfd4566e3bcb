"""What flows get of a line that they share, in exact numbers."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_tools.plan.simulated.fair_share import Flow, Hub, World

RATES = st.sampled_from([1.0, 2.0, 3.0, 5.0, 8.0])
AMOUNTS = st.integers(1, 50).map(float)


class Line:
    """A hub, and when the amounts sent through it were complete, by name."""

    def __init__(self, rate: float) -> None:
        self.world = World()
        self.hub = Hub(self.world, rate)
        self.ends: dict[object, float] = {}
        self._sent = 0

    def sends(self, flow: Flow, amount: float, name: object) -> None:
        def through() -> None:
            self.ends[name] = self.world.now

        self._sent += 1
        flow.send(amount, through)

    def runs(self) -> dict[object, float]:
        assert self.world.run(lambda: len(self.ends) == self._sent, 10_000)
        return self.ends


def ends(hub_rate: float, flows: Sequence[tuple[float, float]]) -> list[float]:
    """When each of these (most, amount) is through, if all begin at once."""
    line = Line(hub_rate)
    for number, (most, amount) in enumerate(flows):
        line.sends(line.hub.flow(most), amount, number)
    found = line.runs()
    return [found[number] for number in range(len(flows))]


def test_what_a_slow_flow_leaves_is_for_the_others() -> None:
    # 2 for the slow one and 4 for each of the others, until they are through.
    assert ends(10.0, [(2.0, 8.0), (9.0, 16.0), (9.0, 16.0)]) == pytest.approx([4.0, 4.0, 4.0])


def test_flows_behind_one_line_share_that_first() -> None:
    line = Line(10.0)
    for name in ("a", "b"):
        line.sends(line.hub.flow(behind=("site", 2.0)), 4.0, name)
    line.sends(line.hub.flow(), 16.0, "c")
    assert line.runs() == pytest.approx({"c": 2.0, "a": 4.0, "b": 4.0})


@given(st.lists(st.tuples(RATES, AMOUNTS), min_size=1, max_size=8), RATES)
def test_line_is_neither_idle_nor_overfull(flows: list[tuple[float, float]], rate: float) -> None:
    found = ends(rate, flows)
    total = sum(amount for _, amount in flows)
    assert max(found) >= total / rate - 1e-6
    for (most, amount), end in zip(flows, found, strict=True):
        assert end >= amount / min(most, rate) - 1e-6
    if all(most >= rate for most, _ in flows):
        assert max(found) == pytest.approx(total / rate)


def test_500_flows_of_a_kind_cost_no_more_events_than_one() -> None:
    def events(count: int) -> int:
        line = Line(10.0)
        for number in range(count):
            line.sends(line.hub.flow(), 1.0, number)
        line.runs()
        return line.world.events

    assert events(500) == events(1)
