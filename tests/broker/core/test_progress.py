"""How far the run is, as workers are told with each version: in the core alone."""

from __future__ import annotations

import math
from typing import Any

import pytest

from diloco_protocol.messages import Progress, Released
from diloco_protocol.ranges import MOST
from kit.core_harness import Puppet, Stage, a_stage, alone


def told(puppet: Puppet) -> Progress:
    progress = puppet.got(Released).progress
    assert progress is not None
    return progress


def two(**options: Any) -> tuple[Stage, Puppet, Puppet]:
    stage = a_stage(workers=2, **options)
    a, b = stage.joined("a", "b")
    return stage, a, b


def a_round(number: int, *puppets: Puppet, steps: int = 100, **fields: Any) -> None:
    for place, puppet in enumerate(puppets):
        puppet.pushes(10 * number + place, steps=steps, **fields)
    for puppet in puppets:
        puppet.pulls()


def test_each_version_tells_rounds_steps_and_the_tokens_of_all() -> None:
    _, a, b = two()
    a_round(1, a, b, tokens=50)
    assert told(a) == told(b) == Progress(rounds=1, steps=100, tokens=100)
    a_round(2, a, b, tokens=50)
    assert told(a) == Progress(rounds=2, steps=200, tokens=200)


def test_late_joiner_is_told_how_far_the_run_is_before_its_first_step() -> None:
    stage, a, b = two()
    for number in (1, 2, 3):
        a_round(number, a, b)
    (late,) = stage.joined("late")
    late.pulls()
    assert told(late) == Progress(rounds=3, steps=300)


def test_steps_of_a_round_are_those_of_the_middle_of_its_workers() -> None:
    stage = a_stage(workers=3)
    slow, usual, liar = stage.joined("slow", "usual", "liar")
    for number, (puppet, steps) in enumerate([(slow, 30), (usual, 100), (liar, MOST)]):
        puppet.pushes(number, steps=steps)
    usual.pulls()
    assert told(usual).steps == 100


def test_fragments_are_pushed_for_the_same_steps_which_count_once() -> None:
    stage = a_stage(workers=1, num_fragments=2)
    (a,) = stage.joined("a")
    for number in range(4):
        a.pushes(number, fragment=number % 2, steps=100, tokens=10)
    a.pulls(fragment=1)
    assert told(a) == Progress(rounds=4, steps=200, tokens=20)


def test_asynchronous_workers_share_the_steps() -> None:
    _, a, b = two(mode="async")
    a.pushes(1, steps=100, tokens=5)
    b.pushes(2, steps=100, tokens=5)
    b.pulls()
    assert told(b) == Progress(rounds=2, steps=100, tokens=10)


def test_loss_is_the_mean_of_the_round_and_none_where_nobody_says_one() -> None:
    _, a, b = two()
    a.pushes(1, loss=2.0)
    b.pushes(2, loss=4.0)
    a.pulls()
    assert a.got(Released).loss == 3.0
    a_round(2, a, b)
    assert a.got(Released).loss is None


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_loss_that_is_not_finite_is_not_told(loss: float) -> None:
    _, a = alone()
    a.pushes(1, loss=loss)
    a.pulls()
    assert a.got(Released).loss is None


@pytest.mark.parametrize("durable", [False, True])
def test_progress_outlives_the_broker(durable: bool) -> None:
    stage, a = alone(save_dir="/nowhere", durable=durable)
    for number in (1, 2):
        a.pushes(number, steps=100, tokens=7)
        stage.is_saved()
    later = stage.restarted()
    back = later.worker("a").comes_with(stage.holdings())
    back.pulls()
    assert told(back) == Progress(rounds=2, steps=200, tokens=14)


def test_claims_without_bound_end_nothing() -> None:
    """Totals stay what a message and a checkpoint can hold."""
    stage, a = alone()
    for number in range(3):
        a.pushes(number, steps=MOST, tokens=MOST)
    a.pulls()
    assert told(a) == Progress(rounds=3, steps=MOST, tokens=MOST)
    assert stage.shown()["totals"]["tokens"] == MOST


def test_end_that_is_set_is_told_and_the_nearest_says_how_much_is_done() -> None:
    _, a, b = two(max_rounds=4, token_budget=1000)
    a_round(1, a, b, tokens=50)
    progress = told(a)
    assert (progress.max_rounds, progress.token_budget, progress.max_seconds) == (4, 1000, None)
    assert progress.fraction == 0.25
    a_round(2, a, b, tokens=400)
    assert told(a).fraction == 0.9


def test_run_without_an_end_has_no_fraction_done() -> None:
    _, a, b = two()
    a_round(1, a, b)
    assert told(a).fraction is None
