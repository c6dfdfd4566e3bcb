"""When a training program is restarted, by exit code and a simulated clock."""

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
def test_final_exit_codes_are_not_restarted(code: int) -> None:
    restarts = Restarts(most=5)
    assert restarts.pause(code, ran_s=1.0) is None
    assert restarts.pause(1, ran_s=1.0) == 1.0, "and is not counted"


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
def test_reason_in_the_end_file_replaces_a_lost_exit_code(
    code: int, word: str, meaning: int
) -> None:
    assert meant(code, word) == meaning


def test_pauses_double_up_to_a_minute() -> None:
    restarts = Restarts(most=1000)
    pauses = [restarts.pause(1, 1.0) for _ in range(1000)]
    assert pauses[:4] == [1.0, 2.0, 4.0, 8.0]
    assert set(pauses[6:]) == {LONGEST_PAUSE_S}


def test_long_run_resets_the_count_of_failures() -> None:
    restarts = Restarts(most=2)
    assert [restarts.pause(1, 1.0) for _ in range(2)] == [1.0, 2.0]
    assert restarts.pause(1, BEGAN_WELL_S) == 1.0
    assert restarts.pause(1, BEGAN_WELL_S - 1) == 2.0


def test_restarts_default_to_none() -> None:
    assert Restarts(most=0).pause(1, 1e6) is None
