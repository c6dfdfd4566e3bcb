"""All fragments at once: the last exchange, and one that the script asks for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from worker.training.test_streaming import has_news, layers, streams

from diloco_protocol.messages import (
    Leave,
    Push,
)
from kit.scripted_broker import Beside, ScriptedBroker, version
from kit.uniform_model import Make, at, filled, first

# All fragments at once.

pytest_plugins = ("kit.worker_fixtures",)


def test_force_sync_takes_the_next_turn_of_every_fragment(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    streams(broker, fragment_sync_delay=2)
    worker, descent = begin(layers())
    descent.steps(3)
    push, _ = broker.takes_push(0)
    forced = beside(worker.force_sync)
    for fragment, delta in ((1, 3), (2, 3)):
        other, frozen = broker.takes_push(fragment)
        assert (other.fragment, first(frozen)) == (fragment, delta)
        broker.serves(filled(descent, 5, broker, fragment), version(1), other.push_id)
    broker.serves(filled(descent, 1000, broker), version(1), push.push_id)
    again, frozen = broker.takes_push(3)
    assert (again.fragment, again.base, first(frozen)) == (0, version(1), 0)
    broker.serves(filled(descent, 2000, broker), version(2), again.push_id)
    assert forced() is True
    assert [at(descent, broker, fragment) for fragment in range(3)] == [2000, 5, 5]
    assert worker.state_dict()["cycle_start"] == 3
    descent.steps(2)
    assert broker.hears(Push).fragment == 1


def test_load_global_loads_every_fragment(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    streams(broker)
    worker, descent = begin(layers())
    descent.steps(1)
    loaded = beside(worker.load_global)
    for fragment in range(3):
        broker.hears_pull(fragment)
    for fragment in range(3):
        broker.serves(filled(descent, 10 * fragment, broker, fragment), version(5 + fragment))
    assert loaded() is True
    assert [at(descent, broker, fragment) for fragment in range(3)] == [0, 10, 20]
    steps = beside(descent.steps, 2)
    push, delta = broker.takes_push(0)
    assert (push.base, push.steps, first(delta)) == (version(5), 2, 2)
    broker.serves(filled(descent, 7, broker), version(6), push.push_id)
    steps()


@pytest.mark.parametrize(
    ("merge", "merged"),
    [
        ({}, 1000.0 - 1),
        ({"fragment_update_alpha": 0.5}, 0.5 * 500 + 0.5 * 1000 - 1),
        ({"fragment_merge": "rebase"}, 1000.0 - 1),
    ],
)
def test_flight_that_load_global_met_is_merged_on_what_was_loaded(
    broker: ScriptedBroker, beside: Beside, begin: Make, merge: dict[str, Any], merged: float
) -> None:
    streams(broker, num_fragments=1, sync_every=4, fragment_sync_delay=3, **merge)
    worker, descent = begin()
    descent.steps(4)
    push = broker.hears(Push)
    loaded = beside(worker.load_global)
    while broker.hears_pull().held is None:
        pass
    broker.serves(filled(descent, 500), version(1))
    assert loaded() is True
    assert at(descent) == 500
    broker.serves(filled(descent, 1000), version(2), push.push_id)
    has_news(worker)
    descent.steps(1)
    assert at(descent) == 499, "the reply is early"
    descent.steps(2)
    assert at(descent) == merged - 2


def test_leaving_waits_for_every_flight(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    streams(broker, fragment_sync_delay=3)
    worker, descent = begin(layers())
    descent.steps(4)
    one, _ = broker.takes_push(0)
    two, _ = broker.takes_push(1)
    closed = beside(worker.close)
    broker.serves(filled(descent, 1000, broker), version(1), one.push_id)
    broker.hears_nothing_of(Leave, 0.05)
    broker.serves(filled(descent, 1000, broker, 1), version(1), two.push_id)
    closed()
    broker.hears(Leave)
    assert (at(descent, broker), at(descent, broker, 1)) == (96, 96), "the model stays"
    assert worker.sync_metrics.rounds == 2


def test_delta_that_is_not_finite_restores_every_fragment_and_keeps_the_turn(
    broker: ScriptedBroker, begin: Make
) -> None:
    streams(broker, fragment_sync_delay=1, fragment_max_delay=4)
    worker, descent = begin(layers())
    descent.steps(2)
    push, _ = broker.takes_push(0)
    with torch.no_grad():
        for parameter in descent.model.parameters():
            parameter.fill_(float("nan"))
    descent.steps(2)
    assert [at(descent, broker, fragment) for fragment in range(3)] == [98, 100, 100]
    assert worker.sync_metrics.rejected == 1
    broker.serves(filled(descent, 1000, broker), version(1), push.push_id)
    has_news(worker)
    descent.steps(2)
    assert at(descent, broker) == 1000 - 1
    again = broker.hears(Push)
    assert (again.fragment, again.steps) == (1, 2), "its round still waits for this fragment"
