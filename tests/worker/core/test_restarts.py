"""When a training program is started again, by exit codes and a clock that is only told."""

from __future__ import annotations

import pytest

from diloco_worker.core.restarts import BEGAN_WELL_S, LONGEST_PAUSE_S, RUN_IS_OVER, Restarts


@pytest.mark.parametrize("code", [0, 2, RUN_IS_OVER, 126, 127])
def test_what_starting_again_cannot_mend_is_left_alone(code: int) -> None:
    restarts = Restarts(most=5)
    assert restarts.pause(code, ran_s=1.0) is None
    assert restarts.pause(1, ran_s=1.0) == 1.0, "and it counts for nothing"


@pytest.mark.parametrize("code", [1, 137, 143, 139])
def test_failures_are_followed_by_restarts_as_often_as_allowed(code: int) -> None:
    restarts = Restarts(most=2)
    assert restarts.pause(code, 1.0) is not None
    assert restarts.pause(code, 1.0) is not None
    assert restarts.pause(code, 1.0) is None


def test_pauses_double_up_to_a_minute() -> None:
    restarts = Restarts(most=1000)
    pauses = [restarts.pause(1, 1.0) for _ in range(1000)]
    assert pauses[:4] == [1.0, 2.0, 4.0, 8.0]
    assert set(pauses[6:]) == {LONGEST_PAUSE_S}


def test_who_had_begun_well_is_at_its_first_failure_again() -> None:
    restarts = Restarts(most=2)
    assert [restarts.pause(1, 1.0) for _ in range(2)] == [1.0, 2.0]
    assert restarts.pause(1, BEGAN_WELL_S) == 1.0
    assert restarts.pause(1, BEGAN_WELL_S - 1) == 2.0


def test_none_is_allowed_without_being_asked_for() -> None:
    assert Restarts(most=0).pause(1, 1e6) is None
