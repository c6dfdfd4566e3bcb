"""A week of 32 workers and 125 faults an hour: how much of the work counts, and does anybody wait?"""

import math

import pytest

from simulation.week import FAULTS_AN_HOUR, MODES, H, a_week, simulate


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", MODES)
def test_week_of_faults_costs_only_what_the_killed_had_not_sent(mode: str) -> None:
    week, wanted = simulate(mode, days=7.0), FAULTS_AN_HOUR * 24 * 7.0
    # They come at random, one independent of the other: four standard deviations, or a tenth.
    spread = max(4 * math.sqrt(wanted), 0.1 * wanted)
    assert sum(week["faults"].values()) == pytest.approx(wanted, abs=spread)
    assert week["useful_unharmed"] == 1.0
    mean, most = week["lost_a_kill"]
    assert mean < H / 2
    # Its last push may still be on its way while a worker trains on, up to another H steps.
    assert most <= 2 * H
    # One whose broker is stopped to come back trains on alone until it finds out that it is back. By
    # then it had a push of H steps on its way, which it waits for H / P steps later.
    pieces = a_week(mode).config.num_fragments
    assert week["lost_behind_stop"] <= H + H / pieces
    assert week["lost_more"] <= 0.01 * week["faults"]["kill"]
    assert week["averaged"] >= 0.95
    assert week["to_next_round_s"] < 4 * a_week(mode).cycle_s
