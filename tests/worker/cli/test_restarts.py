"""When a training program is started again, by exit codes and a clock that is only told."""

from __future__ import annotations

import pytest

from diloco_worker.launching import (
    ASKED,
    BEGAN_WELL_S,
    LONGEST_PAUSE_S,
    OVER,
    RUN_IS_OVER,
    TERMINATED,
    Restarts,
    meant,
)


@pytest.mark.parametrize("code", [0, 2, RUN_IS_OVER, 126, 127, 130, TERMINATED])
def test_what_starting_again_cannot_mend_is_left_alone(code: int) -> None:
    restarts = Restarts(most=5)
    assert restarts.pause(code, ran_s=1.0) is None
    assert restarts.pause(1, ran_s=1.0) == 1.0, "and it counts for nothing"


@pytest.mark.parametrize("code", [1, 137, 129, 139])
def test_failures_are_followed_by_restarts_as_often_as_allowed(code: int) -> None:
    restarts = Restarts(most=2)
    assert restarts.pause(code, 1.0) is not None
    assert restarts.pause(code, 1.0) is not None
    assert restarts.pause(code, 1.0) is None


@pytest.mark.parametrize(
    ("code", "word", "meaning"),
    [
        (1, OVER, RUN_IS_OVER),
        (1, ASKED, TERMINATED),
        (137, OVER, RUN_IS_OVER),
        (1, "", 1),
        (1, "nonsense", 1),
        (0, ASKED, 0),
        (2, OVER, 2),
    ],
)
def test_word_of_a_worker_stands_for_an_exit_code_that_was_lost(
    code: int, word: str, meaning: int
) -> None:
    assert meant(code, word) == meaning


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
