"""What a worker says in the log: a line for each sync, a warning where nothing is learnt."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from diloco_protocol.messages import Message, Push, Released
from kit.scripted_broker import Beside, Descent, ScriptedBroker, run_config, version
from kit.uniform_model import Make, filled, until

pytest_plugins = ("kit.worker_fixtures",)


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))


def lines(caplog: pytest.LogCaptureFixture, begin: str) -> list[str]:
    return [each for each in caplog.messages if each.startswith(begin)]


def sync(
    broker: ScriptedBroker, beside: Beside, descent: Descent, steps: int, counter: int, **told: Any
) -> Push:
    """So many steps to the next boundary of a run without fragments, and its round."""
    training = beside(descent.steps, steps)
    push, _ = broker.takes_push()
    broker.serves(filled(descent, 100), version(counter), push.push_id, **told)
    training()
    return push


# A line for each sync.


@pytest.fixture
def info(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="diloco.worker")
    return caplog


def in_round(broker: ScriptedBroker, number: int) -> None:
    says = broker.says

    def with_round(message: Message, payload: Any = None) -> None:
        if isinstance(message, Released):
            message = replace(message, round=number, averaged=1)
        says(message, payload)

    broker.says = with_round  # type: ignore[method-assign]


def test_each_sync_has_a_line(
    broker: ScriptedBroker, beside: Beside, begin: Make, info: pytest.LogCaptureFixture
) -> None:
    broker.config = run_config(sync_every=4)
    _, descent = begin(nn.Linear(2, 1, bias=False))
    in_round(broker, 12)
    sync(broker, beside, descent, 4, 1)
    (line,) = lines(info, "Synchronised: ")
    norm = (2 * 4.0**2) ** 0.5
    assert line.startswith(
        f"Synchronised: version 1 (round 12) has 4 steps of this worker, norm {norm:.4g}, "
        "staleness 0; waited "
    ), "without fragments there is no slot to speak of"
    assert line.endswith(" s.")


def test_line_of_asynchronous_mode_has_the_staleness(
    broker: ScriptedBroker, beside: Beside, begin: Make, info: pytest.LogCaptureFixture
) -> None:
    broker.config = run_config(mode="async", sync_every=4)
    _, descent = begin()
    sync(broker, beside, descent, 4, 4, staleness=3)
    (line,) = lines(info, "Synchronised: version 4 has 4 steps")
    assert "staleness 3" in line


def test_line_of_a_fragment_names_it_and_its_delay(
    broker: ScriptedBroker, begin: Make, info: pytest.LogCaptureFixture
) -> None:
    broker.config = run_config(sync_every=12, num_fragments=3, fragment_delay_auto=True)
    worker, descent = begin(layers())
    descent.steps(5)
    push, _ = broker.takes_push(0)
    broker.serves(filled(descent, 100, broker), version(1), push.push_id)
    until(lambda: bool(worker._link and worker._link.has_news))
    descent.steps(1)
    (line,) = lines(info, "Synchronised: version 1 (round 0, fragment 0) has 4 steps")
    assert "merged 2 steps after the slot" in line


def test_line_of_a_sync_is_not_held_back_by_the_wait_of_the_next(
    broker: ScriptedBroker, beside: Beside, begin: Make, info: pytest.LogCaptureFixture
) -> None:
    broker.config = run_config(sync_every=4)
    _, descent = begin()
    sync(broker, beside, descent, 4, 1)
    sync(broker, beside, descent, 4, 2)
    training = beside(descent.steps, 4)
    push, _ = broker.takes_push()
    until(lambda: bool(lines(info, "Synchronised: version 2")))
    assert beside.is_busy, "the third boundary still waits"
    broker.serves(filled(descent, 100), version(3), push.push_id)
    training()


# Nothing is learnt.


def test_two_pseudo_gradients_of_zeros_in_a_row_are_a_warning_once(
    broker: ScriptedBroker, beside: Beside, begin: Make, caplog: pytest.LogCaptureFixture
) -> None:
    broker.config = run_config(sync_every=4)
    worker, descent = begin()
    (group,) = descent.optimizer.param_groups
    told = []
    for counter, lr in enumerate((0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0), start=1):
        group["lr"] = lr
        push = sync(broker, beside, descent, 4, counter)
        assert (push.norm == 0) == (lr == 0)
        told.append(len(lines(caplog, "The pseudo-gradient was all zeros twice in a row")))
    assert told == [0, 0, 0, 1, 1, 1, 1, 2]
    assert "a learning rate of 0 (a scheduler)" in str(worker.sync_metrics.last_error)


def test_boundaries_that_are_forced_without_a_step_are_no_warning(
    broker: ScriptedBroker, beside: Beside, begin: Make, caplog: pytest.LogCaptureFixture
) -> None:
    worker, descent = begin()
    for counter in range(1, 4):
        forced = beside(worker.force_sync)
        push, _ = broker.takes_push()
        broker.serves(filled(descent, 100), version(counter), push.push_id)
        assert forced()
    assert worker.sync_metrics.last_error is None
