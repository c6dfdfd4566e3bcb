"""What a round costs over a line, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco_worker.doctor.round_cost import (
    Exchange,
    Line,
    round_seconds,
    sync_every_for,
    utilisation,
    waits_seconds,
)

# 1000 parameters of 2 bytes up and 4 down, in ten chunks; 1000 bytes a second up, 500 down.
EXCHANGE = Exchange(1000, 2, 4, chunk_elements=100)
LINE = Line(up=1000.0, down=500.0, round_trip=0.1)


def test_streaming_round_takes_the_slower_way_and_one_chunk_of_the_other() -> None:
    assert round_seconds(EXCHANGE, LINE) == pytest.approx(0.2 + 8.0 + 0.3)
    assert round_seconds(EXCHANGE, replace(LINE, up=100.0)) == pytest.approx(20.0 + 0.8 + 0.3)


def test_whole_pushes_come_back_behind_themselves() -> None:
    assert round_seconds(replace(EXCHANGE, is_whole=True), LINE) == pytest.approx(2.0 + 8.0 + 0.3)


def test_fragments_take_round_trips_of_their_own() -> None:
    pieces = replace(EXCHANGE, fragments=4)
    assert round_seconds(pieces, LINE) == pytest.approx(4 * (0.2 + 2.0 + 0.3))


def test_model_of_less_than_a_chunk_is_one_chunk() -> None:
    tiny = Exchange(10, 2, 4, chunk_elements=100)
    assert round_seconds(tiny, LINE) == pytest.approx(0.02 + 0.08 + 0.3)


def test_steps_made_meanwhile_are_not_waited_for() -> None:
    delayed = replace(EXCHANGE, delay=3.0)
    assert waits_seconds(delayed, LINE, step_time=1.0) == pytest.approx(8.5 - 3.0)
    assert waits_seconds(delayed, LINE, step_time=100.0) == 0.0
    assert utilisation(delayed, LINE, 100.0, 5) == 1.0


@pytest.mark.parametrize("step_time", [0.01, 0.5, 7.0])
@pytest.mark.parametrize("delay", [0.0, 3.0])
@pytest.mark.parametrize("share", [0.5, 0.95])
def test_least_h_has_the_share_of_time_and_one_step_less_has_not(
    step_time: float, delay: float, share: float
) -> None:
    exchange = replace(EXCHANGE, delay=delay)
    least = sync_every_for(exchange, LINE, step_time, share)
    assert utilisation(exchange, LINE, step_time, least) >= share - 1e-9
    if least > 1:
        assert utilisation(exchange, LINE, step_time, least - 1) < share


def test_h_is_at_least_one_step_for_each_fragment() -> None:
    assert sync_every_for(replace(EXCHANGE, fragments=4), LINE, 1e9, 0.95) == 4
