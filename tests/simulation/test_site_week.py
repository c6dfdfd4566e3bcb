"""A week of 32 workers in sites, 125 faults an hour: each push counts once, nobody waits for ever.

The figures of `simulation.site_week`, in all modes; `PYTHONPATH=tests python -m simulation.site_week`
prints them as a table, and so does `pytest -s`.
"""

from __future__ import annotations

import math

import pytest

from simulation.site_week import CYCLE_S, MODES, simulate, table
from simulation.week import FAULTS_AN_HOUR

# Of the pushes that would fit in with nobody killed and no line down. Where rounds have to be closed
# together, who was killed is there again from the next one.
LEAST = {"sync": 0.3, "fragments": 0.3, "async": 0.6}


def check(mode: str, days: float) -> None:
    week, hours = simulate(mode, days=days), 24 * days
    print(f"\n{table([week])}")
    spread = max(4 * math.sqrt(FAULTS_AN_HOUR / hours), 0.1 * FAULTS_AN_HOUR)
    assert week["faults an hour"] == pytest.approx(FAULTS_AN_HOUR, abs=spread)
    # Only where a ledger cannot tell any more whether a push is in: nothing is counted then.
    assert week["refused as"] in {"", "stale"}
    assert week["refused"] <= math.floor(days) * 0.01 * week["pushes counted"]
    assert week["longest without a version, s"] < 4 * CYCLE_S
    assert week["of those that fit in"] > LEAST[mode]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_two_hours_of_faults_cost_no_push_and_hold_nobody_up(mode: str) -> None:
    check(mode, days=1 / 12)


# With fragments a longer one comes to pushes that were given up, and two more, before they counted: what
# they left out in few bits is missed (`relay.unsettled`), and the simulation says so.
@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("mode", "days"), [("sync", 1.0), ("async", 1.0), ("fragments", 0.25)])
def test_day_of_faults_costs_no_push_and_holds_nobody_up(mode: str, days: float) -> None:
    check(mode, days)
