"""Schedules of the outer optimizer: against torch's own, and what their texts may be."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from diloco_broker.config import BrokerConfig
from diloco_broker.config.schedule import OuterSchedule, Schedule


def by_torch(make: Any, lr: float, rounds: int) -> list[float]:
    """The learning rate of each step under a scheduler of torch, as Python's floats."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=lr)
    scheduler = make(optimizer)
    seen = []
    for _ in range(rounds):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


@pytest.mark.parametrize("rounds", [1, 2, 7, 30])
@pytest.mark.parametrize("final", [1.0, 0.25, 0.001])
def test_learning_rate_falls_as_in_torch_s_schedulers_and_stays(rounds: int, final: float) -> None:
    eta, beyond = 0.7, 3
    shapes = {
        "linear": lambda o: lr_scheduler.LinearLR(o, 1.0, final, total_iters=rounds),
        "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, rounds, eta_min=final * eta),
    }
    for shape, make in shapes.items():
        wanted = by_torch(make, eta, rounds + 1) + [final * eta] * beyond
        schedule = OuterSchedule(lr=Schedule.parse(f"{shape}:{rounds}:{final}"))
        ours = [eta * schedule.factor(count) for count in range(rounds + 1 + beyond)]
        assert ours == pytest.approx(wanted, abs=1e-12), shape


@pytest.mark.parametrize("rounds", [1, 2, 7, 30])
@pytest.mark.parametrize("start", [0.1, 0.5])
def test_momentum_rises_as_in_torch_s_schedulers_and_stays(rounds: int, start: float) -> None:
    mu, beyond = 0.9, 3
    shapes = {
        "linear": lambda o: lr_scheduler.LinearLR(o, start / mu, 1.0, total_iters=rounds),
        # It begins with the larger end, so it is read backwards.
        "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, rounds, eta_min=start),
    }
    for shape, make in shapes.items():
        wanted = by_torch(make, mu, rounds + 1)
        wanted = (wanted if shape == "linear" else wanted[::-1]) + [mu] * beyond
        schedule = OuterSchedule(warmup=Schedule.parse(f"{shape}:{rounds}:{start}"))
        ours = [schedule.momentum(mu, count) for count in range(rounds + 1 + beyond)]
        assert ours == pytest.approx(wanted, abs=1e-12), shape


@pytest.mark.parametrize("mu", [0.0, 0.3, 0.5])
def test_run_that_asks_for_no_more_than_the_start_has_its_momentum_at_once(mu: float) -> None:
    schedule = OuterSchedule(warmup=Schedule.parse("linear:10:0.5"))
    assert [schedule.momentum(mu, count) for count in range(12)] == [mu] * 12


def test_third_number_is_a_tenth_and_zero_where_it_is_left_out() -> None:
    left_out = OuterSchedule(Schedule.parse("cosine:4"), Schedule.parse("linear:4"))
    given_out = OuterSchedule(Schedule.parse("cosine:4:0.1"), Schedule.parse("linear:4:0"))
    for count in range(6):
        assert left_out.factor(count) == given_out.factor(count)
        assert left_out.momentum(0.9, count) == given_out.momentum(0.9, count)
    assert left_out.momentum(0.9, 0) == 0
    assert left_out.factor(4) == pytest.approx(0.1)


def test_asynchronous_run_counts_a_round_for_each_buffer_of_pushes() -> None:
    texts: dict[str, Any] = {
        "outer_lr_schedule": "linear:10:0.5",
        "outer_momentum_warmup": "linear:10",
    }
    rounds = BrokerConfig(**texts).outer_schedule
    pushes = BrokerConfig(**texts, mode="async", workers=4).outer_schedule
    own = BrokerConfig(**texts, mode="async", workers=4, dn_buffer=2).outer_schedule
    of_rounds = BrokerConfig(**texts, outer="dn", dn_buffer=4).outer_schedule
    for count in range(12):
        assert pushes.factor(4 * count) == own.factor(2 * count) == rounds.factor(count)
        assert pushes.momentum(0.9, 4 * count) == rounds.momentum(0.9, count)
        assert of_rounds.factor(count) == rounds.factor(count), "each round is one gradient"


NO_SCHEDULE: list[Any] = [
    *("", "linear", "linear:", "linear:0", "linear:-3", "linear:1.5", "linear:10:", "linear:10:a"),
    *("linear:10:0.5:1", "linear:1e3", "linear:10:nan", "linear:10:inf", "linear:10:-0.1"),
    *("constant:10", "Cosine:10", " cosine:10", "cosine:10\n", "cosine:1000001", "step:10"),
    *("cosine:\u0661\u0660", "cosine:10:1e-3", b"linear:10"),
    *(None, 10, 0.5, True, [], ["constant"], {}),
]


@pytest.mark.parametrize("text", NO_SCHEDULE, ids=repr)
def test_text_that_is_not_a_schedule_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match=r"schedule|rounds"):
        Schedule.parse(text)


@given(st.text(max_size=40) | st.from_regex(r"(linear|cosine):[0-9]{0,9}(:[0-9.]{0,12})?"))
def test_any_text_is_read_within_bounds_or_refused(text: str) -> None:
    try:
        schedule = Schedule.parse(text)
    except ValueError:
        return
    assert 1 <= schedule.rounds <= 1_000_000
    for rounds in (0, 0.5, 1, schedule.rounds, 10**12):
        assert 0 <= schedule.done(rounds) <= 1
