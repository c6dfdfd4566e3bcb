"""Fragments over real sockets: what is pushed when, what all of them do at once, broken connections.

With H = 6 and P = 3 fragment 0 has its slot after step 2, fragment 1 after step 4, fragment 2 after
step 6. When training waits is in `test_flights` of the core, what is merged how in `test_merges`.
"""

from __future__ import annotations

from typing import Any

import pytest

from diloco_protocol.messages import Heartbeat, Push
from kit.scripted_broker import ScriptedBroker
from kit.scripted_training import H, ScriptedTraining, layers

pytest_plugins = ("kit.worker_fixtures",)

STREAMS = {"sync_every": 6, "num_fragments": 3}


def begins(training: ScriptedTraining, **changes: Any) -> Any:
    return training.begins(layers(), config=STREAMS | changes)


def test_broker_is_told_of_the_delay_in_use(training: ScriptedTraining) -> None:
    begins(training, sync_every=12, fragment_delay_auto=True)
    training.steps(4)
    assert training.broker.hears(Heartbeat).merge_delay is None, "nothing has been merged yet"
    push, _ = training.takes(0)
    training.steps(1)
    training.brings(1000, 1, push)
    training.steps(3)  # merged after two steps; then the slot of fragment 1, with a heartbeat
    while (told := training.broker.hears(Heartbeat)).step < 8:
        pass
    assert (told.merge_delay, training.broker.hears(Push).fragment) == (2, 1)


@pytest.mark.parametrize(
    ("merge", "merged"),
    [
        ({}, 1000.0 - 1),
        ({"fragment_update_alpha": 0.5}, 0.5 * 500 + 0.5 * 1000 - 1),
        ({"fragment_merge": "rebase"}, 1000.0 - 1),
    ],
)
def test_flight_that_load_global_met_is_merged_on_what_was_loaded(
    training: ScriptedTraining, broker: ScriptedBroker, merge: dict[str, Any], merged: float
) -> None:
    worker = training.begins(config={"fragment_sync_delay": 3, **merge})
    training.steps(H)
    push = broker.hears(Push)
    training.does(worker.load_global)
    training.is_asked_for_newest()
    training.serves(500, 1)
    assert training.done() is True
    assert training.values == 500
    training.brings(1000, 2, push)
    training.steps(1)
    assert training.values == 499, "the reply is early"
    training.steps(2)
    assert training.values == merged - 2
