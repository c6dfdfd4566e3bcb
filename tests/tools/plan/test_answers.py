"""Relays, failures, memory and the search: what follows from rounds."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from diloco_protocol.dtypes import SIZES
from diloco_protocol.errors import UsageError
from diloco_tools.plan.answer import answer, at_a_site, between_sites
from diloco_tools.plan.question import USABLE, Question
from diloco_tools.plan.report import advice
from diloco_tools.plan.search import Found, search

pytestmark = pytest.mark.timeout(300)

PIECES = 4
INT4Z: dict[str, Any] = {"wire_dtype": "int4z", "reply_dtype": "int4z"}


def of_32(**fields: Any) -> Question:
    return Question(1_000_000_000, workers=32, sites=4, delays=(0.05,), **fields)


@pytest.mark.parametrize(
    ("fields", "through", "between"),
    [
        ({}, (64e9, 128e9), 144e9),
        (INT4Z, (8.8e9, 8.8e9), 13.2e9),
        ({**INT4Z, "has_relays": True}, (1.1e9, 1.1e9), 1.65e9),
    ],
    ids=["star, bf16 and fp32", "star, int4z", "relays, int4z"],
)
def test_32_workers_in_4_sites_move_these_bytes_a_round(
    fields: dict[str, Any], through: tuple[float, float], between: float
) -> None:
    found = answer(of_32(**fields), pieces=PIECES)
    assert (found.bytes_in, found.bytes_out) == pytest.approx(through, rel=1e-6)
    assert found.bytes_wan == pytest.approx(between, rel=1e-6)


def test_round_through_relays_takes_as_long_as_its_slower_side() -> None:
    question = of_32(has_relays=True)
    site, hub = at_a_site(question), between_sites(question)
    assert (site.workers, site.broker_link) == (8, question.lan_link)
    assert (hub.workers, hub.sites) == (4, 4)
    found = answer(question, pieces=PIECES)
    assert found.site is not None
    slower = max(found.site.exchange_s, answer(hub, pieces=PIECES).measured.exchange_s)
    assert found.measured.exchange_s == pytest.approx(slower, rel=0.02)


@pytest.mark.slow
def test_workers_of_a_site_share_its_line() -> None:
    slow = replace(of_32(), broker_link=1e12, links=(1e9,))
    alone, shared = answer(slow, pieces=PIECES), answer(replace(slow, site_link=1e9), pieces=PIECES)
    replies = 8 * 4e9 / (1e9 * USABLE / 8)
    assert replies <= shared.measured.slowest_s < 1.1 * replies
    assert alone.measured.slowest_s < replies / 3


def test_memory_is_that_of_the_sizing_table() -> None:
    eight = Question(1_000_000_000, workers=8)
    assert answer(eight, pieces=1).broker_memory == pytest.approx(12.5e9, rel=0.01)
    few = answer(replace(eight, **INT4Z), pieces=1).broker_memory
    assert few == pytest.approx(16.5e9, rel=0.01)
    whole = answer(replace(eight, is_whole=True), pieces=1).broker_memory
    assert whole == pytest.approx(12.5e9 + 8 * SIZES["bf16"].element * 1e9, rel=0.01)


def test_failures_cost_their_worker_half_a_cycle_and_the_others_the_time_out() -> None:
    every, back = 86400.0, 300.0
    question = Question(
        100_000_000, workers=8, links=(1e9,), fails_every_s=every, back_after_s=back
    )
    calm = answer(question, pieces=PIECES)
    failures = calm.failures
    assert failures is not None and failures.others_wait_s == 0.0
    whole = 4e8 / (1e9 * 0.95 / 8)
    assert failures.lost_s == pytest.approx(calm.cycle_s / 2 + back + whole)
    expected = calm.utilisation / (1 + failures.lost_s / every)
    assert failures.utilisation == pytest.approx(expected)
    unnoticed = answer(replace(question, dies_unnoticed=True), pieces=PIECES).failures
    assert unnoticed is not None
    # In the last 120 s of a cycle it is missed for what is left of them, 60 s in the mean.
    assert unnoticed.others_wait_s == pytest.approx(120 * 60 / calm.cycle_s)
    assert unnoticed.utilisation < failures.utilisation
    assert answer(replace(question, fails_every_s=None), pieces=1).failures is None


# The search. Dozens of runs each.


@cache
def found_for(target: float, sync_every: int = 500, step_s: float = 1.0) -> Found:
    question = Question(
        1_000_000_000, delays=(0.02,), broker_link=5e8, sync_every=sync_every, step_s=step_s
    )
    return search(question, target)


@pytest.mark.slow
def test_mildest_setting_has_the_share_and_milder_ones_have_not() -> None:
    found = found_for(0.95)
    best = found.best
    assert best is not None and found.steps == 500
    assert best.answer.utilisation >= 0.95
    for option in found.options[: found.options.index(best)]:
        assert option.answer.utilisation < 0.95 or not option.is_mild
    words = advice(found)
    assert f"--wire-dtype {best.question.wire_dtype}" in words and "--sync-every 500 " in words


@pytest.mark.slow
def test_h_grows_where_nothing_else_is_enough() -> None:
    found = found_for(0.95, sync_every=8, step_s=0.1)
    assert found.best is not None and found.steps is not None and found.steps > 8
    with_it = replace(found.best.question, sync_every=found.steps)
    assert answer(with_it, pieces=8).utilisation == pytest.approx(0.95, abs=0.005)
    assert all((each.needed or 0) >= found.steps for each in found.options)


# What cannot be.


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"parameters": 0}, "--parameters"),
        ({"workers": 5000}, "--workers must be between 1 and 1,000, got 5,000"),
        ({"fragments": 4, "delay_steps": 10, "sync_every": 40}, r"H = P \(tau \+ 1\) = 44 steps"),
        ({"wire_dtype": "int3"}, "Unknown wire dtype 'int3'"),
        ({"reply_dtype": "sparse"}, "Unknown wire dtype 'sparse'"),
        ({"mode": "streaming"}, "choose sync or async"),
        ({"links": (0.0,)}, "--link is 0 bits a second"),
        ({"delays": (100.0,)}, "--delay is 100 s"),
        ({"step_s": 0.0}, "--step-time"),
        ({"workers": 5, "sites": 2}, "--sites must divide --workers"),
        ({"has_relays": True}, "--relays needs several sites"),
        ({"workers": 4, "sites": 2, "has_relays": True, "mode": "async"}, "--mode async"),
    ],
)
def test_what_cannot_be_gets_a_sentence(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Question(**{"parameters": 1_000_000, **fields})
