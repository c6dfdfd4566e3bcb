"""A run goes on through takeovers by its standby, and each push counts once in it."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_broker.standby import fence
from simulation.takeover import Faults, Takeover

# Nothing happens by itself.
QUIET = Faults(0.0, 0.0, 0.0, 0.0)
MODES: dict[str, dict[str, Any]] = {
    "async": {"mode": "async"},
    "fragments": {"num_fragments": 2, "sync_every": 10},
}


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))]
)
def test_a_run_keeps_its_promises_through_takeovers(seed: int) -> None:
    run = Takeover(seed).run()
    assert not run.refused
    assert {name for name, _ in run.releases} == ({"hub", "standby"} if run.taken_over else {"hub"})


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_goes_on_at_the_standby(mode: str) -> None:
    run = Takeover(1, QUIET, **MODES[mode])

    def dies() -> None:
        run.hosts["hub"].dies()

    run.world.after(40.0, dies)
    run.run(80.0)
    assert run.taken_over == 1
    hub, standby = (
        [at for name, at in run.releases if name == wanted] for wanted in ("hub", "standby")
    )
    assert hub and standby and hub[-1] < standby[0]


@pytest.mark.nightly
def test_a_hub_without_a_fence_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fence, "may_release", lambda _: True)
    monkeypatch.setattr(fence, "holds_rounds", lambda _: False)
    monkeypatch.setattr(fence, "sends_away", lambda _: [])
    with pytest.raises(AssertionError, match="the hub releases a version, and was replaced"):
        run_all(range(20))


def run_all(seeds: range) -> None:
    for seed in seeds:
        Takeover(seed).run()


@pytest.mark.nightly
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(5))
def test_every_mode_keeps_its_promises_through_takeovers(mode: str, seed: int) -> None:
    Takeover(seed, **MODES[mode]).run()
