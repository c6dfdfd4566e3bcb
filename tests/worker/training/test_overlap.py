"""Replies merged as soon as they are here, on fast links and slow ones.

Each optimizer step lowers every value by 1, from 100. With H = 12 and P = 3 fragment 0 has its slot
after step 4, and training waits for its reply 4 steps later, where fragment 1 has its slot.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from diloco_protocol import UsageError
from diloco_protocol.messages import Heartbeat, Push
from diloco_worker import DiLoCoWorker
from diloco_worker.training.settings import resolve
from kit.scripted_broker import Beside, ScriptedBroker, run_config, version
from kit.uniform_model import Make, at, filled, first, until

pytest_plugins = ("kit.worker_fixtures",)


def layers(count: int = 3) -> nn.Module:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(count)))


def overlaps(broker: ScriptedBroker, **changes: Any) -> None:
    fields = {"sync_every": 12, "num_fragments": 3, "fragment_delay_auto": True}
    broker.config = run_config(**{**fields, **changes})


def has_news(worker: DiLoCoWorker) -> None:
    until(lambda: bool(worker._link and worker._link.has_news))


@pytest.mark.parametrize(
    ("merge", "merged"), [({}, 1000.0), ({"fragment_merge": "rebase"}, 1000.0 - 1)]
)
def test_on_a_fast_link_the_reply_is_merged_at_the_next_step(
    broker: ScriptedBroker, begin: Make, merge: dict[str, Any], merged: float
) -> None:
    overlaps(broker, **merge)
    worker, descent = begin(layers())
    descent.steps(4)
    push, delta = broker.takes_push(0)
    assert (push.fragment, first(delta)) == (0, 4)
    broker.serves(filled(descent, 1000, broker), version(1), push.push_id)
    has_news(worker)
    assert at(descent, broker) == 96, "between two steps the model is the script's"
    descent.steps(1)
    assert at(descent, broker) == merged
    metrics = worker.sync_metrics
    assert (metrics.rounds, metrics.merge_delay, metrics.late_merges) == (1, 1, 0)


@pytest.mark.parametrize("steps_on_the_way", [2, 3])
def test_on_a_slow_link_training_goes_on_until_the_reply_is_here(
    broker: ScriptedBroker, begin: Make, steps_on_the_way: int
) -> None:
    overlaps(broker)
    worker, descent = begin(layers())
    descent.steps(4)
    push, _ = broker.takes_push(0)
    before = worker.sync_metrics.seconds_waited
    descent.steps(steps_on_the_way - 1)
    assert worker.sync_metrics.seconds_waited == before, "training did not stand still"
    broker.serves(filled(descent, 1000, broker), version(1), push.push_id)
    has_news(worker)
    descent.steps(1)
    assert at(descent, broker) == 1000
    metrics = worker.sync_metrics
    assert (metrics.merge_delay, metrics.late_merges) == (steps_on_the_way, 0)
    assert metrics.seconds_waited == before


@pytest.mark.parametrize(
    ("changes", "waits_after"),
    [
        ({}, 4),  # H/P
        ({"fragment_max_delay": 2}, 2),
        ({"num_fragments": 1}, 6),  # half of H
        ({"num_fragments": 1, "mode": "async"}, 6),
    ],
    ids=str,
)
def test_training_waits_for_a_reply_that_takes_longer_than_the_longest_delay(
    broker: ScriptedBroker,
    beside: Beside,
    begin: Make,
    changes: dict[str, Any],
    waits_after: int,
) -> None:
    overlaps(broker, **changes)
    worker, descent = begin(layers())
    descent.steps(12 // broker.config.num_fragments + waits_after - 1)
    push, _ = broker.takes_push(0)
    steps = beside(descent.steps, 1)
    until(lambda: bool(worker._link and worker._link.progress.waiting))
    broker.serves(filled(descent, 1000, broker), version(1), push.push_id)
    steps()
    assert at(descent, broker) == 1000
    metrics = worker.sync_metrics
    assert (metrics.merge_delay, metrics.late_merges) == (waits_after, 0)
    assert metrics.seconds_waited > 0


def test_worker_with_an_h_of_its_own_waits_by_that(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    overlaps(broker, mode="async")
    worker, descent = begin(layers(), sync_every=6)
    descent.steps(3)
    push, _ = broker.takes_push(0)
    steps = beside(descent.steps, 1)
    until(lambda: bool(worker._link and worker._link.progress.waiting))
    broker.serves(filled(descent, 1000, broker), version(1), push.push_id)
    steps()
    assert worker.sync_metrics.merge_delay == 2


def test_broker_is_told_of_the_delay_in_use(broker: ScriptedBroker, begin: Make) -> None:
    overlaps(broker)
    worker, descent = begin(layers())
    descent.steps(4)
    told = hears_of_step(broker, 4)
    push, _ = broker.takes_push(0)
    assert told.merge_delay is None, "nothing has been merged yet"
    descent.steps(1)
    broker.serves(filled(descent, 1000, broker), version(1), push.push_id)
    has_news(worker)
    descent.steps(3)  # merged after two steps; then the slot of fragment 1, with a heartbeat
    told = hears_of_step(broker, 8)
    assert broker.hears(Push).fragment == 1
    assert told.merge_delay == 2


def hears_of_step(broker: ScriptedBroker, step: int) -> Heartbeat:
    """The heartbeat at a slot; it comes before the push, which is heard later."""
    told = broker.hears(Heartbeat)
    while told.step < step:
        told = broker.hears(Heartbeat)
    return told


@pytest.mark.parametrize(
    ("given", "environ"),
    [
        ({"fragment_sync_delay": "auto"}, {}),
        ({}, {"DILOCO_FRAGMENT_SYNC_DELAY": "auto"}),
    ],
    ids=str,
)
def test_worker_may_insist_on_auto(given: dict[str, Any], environ: dict[str, str]) -> None:
    assert resolve(given, environ).wants == {"fragment_sync_delay": "auto"}


@pytest.mark.parametrize(
    ("given", "environ", "sentence"),
    [
        (
            {"fragment_sync_delay": "soon"},
            {},
            "fragment_sync_delay is 'soon'; it must be a whole number, 0 or more, or 'auto'.",
        ),
        (
            {},
            {"DILOCO_FRAGMENT_SYNC_DELAY": "soon"},
            "DILOCO_FRAGMENT_SYNC_DELAY is 'soon'; it must be a whole number, 0 or more, or 'auto'.",
        ),
    ],
    ids=str,
)
def test_delay_that_is_neither_a_number_nor_auto_gets_a_sentence(
    given: dict[str, Any], environ: dict[str, str], sentence: str
) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(given, environ)
    assert str(caught.value) == sentence
