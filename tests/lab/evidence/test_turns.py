"""Who computes when: the order of virtual time, and how a run ends."""

import threading
from itertools import islice

import pytest

from diloco_lab.evidence import training
from diloco_lab.evidence.training import Baton, Broken, Stuck, virtual_order
from kit.evidence_trials import SPEEDS


def test_pushes_come_as_the_speeds_have_them() -> None:
    found = list(islice(virtual_order(SPEEDS, [25] * 4), 14))
    ends = sorted((n * 25 / v, w) for w, v in enumerate(SPEEDS) for n in range(1, 20))
    assert found == ends[:14]
    assert [worker for _, worker in found[:8]] == [3, 3, 2, 3, 3, 2, 1, 3]


def passed_on(baton: Baton, workers: int) -> list[tuple[float, int, int]]:
    """Threads that take the baton until the run has ended: when, who, and steps made before."""
    found: list[tuple[float, int, int]] = []

    def work(number: int) -> None:
        while baton.wait_for(number):
            found.append((baton.now, number, baton.made))
            baton.pass_on()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return found


def test_baton_goes_round_until_all_steps_are_made() -> None:
    baton = Baton([1.0, 2.0], [4, 4], 16)
    assert passed_on(baton, 2) == [(2.0, 1, 0), (4.0, 0, 4), (4.0, 1, 8), (6.0, 1, 12)]
    assert (baton.made, baton.share, baton.now) == (16, 1.0, 6.0)


def test_nobody_waits_for_a_run_that_has_broken() -> None:
    baton = Baton([1.0, 1.0], [1, 1], 10)
    baton.end(broken=True)
    for number in (0, 1):
        with pytest.raises(Broken):
            baton.wait_for(number)


def test_waiting_in_vain_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "PATIENCE_S", 0.01)
    with pytest.raises(Stuck, match="worker 1 had no turn"):
        Baton([2.0, 1.0], [1, 1], 10).wait_for(1)
