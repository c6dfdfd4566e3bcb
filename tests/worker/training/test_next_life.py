"""A worker goes on from its checkpoint, message by message."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from diloco_protocol import Bitmap, Counted, Ledger
from diloco_protocol.messages import Chunk, Notice, Pull, Purpose, Push, Released
from diloco_worker.core.effects import Send
from diloco_worker.core.events import Offer, VerifyPushes
from kit.next_life import STRANGER, H, Resume, saved_by, says_current
from kit.scripted_broker import RUN, Beside, ScriptedBroker, run_config, version
from kit.session_harness import Desk, gradient
from kit.session_harness import version as version_of
from kit.uniform_model import Make, at, filled, first, until

pytest_plugins = ("kit.worker_fixtures", "kit.next_life_fixtures")


def test_worker_joins_with_what_it_holds_and_trains_on_in_the_middle_of_the_cycle(
    broker: ScriptedBroker, beside: Beside, begin: Make, resume: Resume
) -> None:
    worker, descent = begin()
    descent.steps(2)
    life = resume(saved_by(worker, descent), version(0))
    assert (life.join.run, life.join.session) == (RUN, None)
    assert life.join.versions[0] == version(0)
    pull = says_current(broker, version(0))
    assert (pull.held_version, pull.after) == (version(0), -1)
    assert pull.held == Bitmap.full(3).to_bytes(), "nothing needs to be sent"
    life.started()
    assert at(life.descent) == 98
    steps = beside(life.descent.steps, 2)
    says_current(broker, version(0))
    push, delta = broker.takes_push()
    assert (push.steps, push.base, first(delta)) == (H, version(0), H)
    broker.serves(filled(descent, 50), version(1), push.push_id)
    steps()
    assert at(life.descent) == 50
    assert (life.worker.local_step, life.worker.sync_count) == (H, 1)
    steps = beside(life.descent.steps, H)
    push, _ = broker.takes_push()  # no longer in doubt: offered without asking
    assert push.base == version(1)
    broker.serves(filled(descent, 0), version(2), push.push_id)
    steps()


class PartlyFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Linear(3, 3)
        self.fixed = nn.Linear(2, 2).requires_grad_(False)


def test_frozen_parameters_are_those_that_the_script_has_loaded(
    broker: ScriptedBroker, begin: Make, resume: Resume
) -> None:
    worker, descent = begin(PartlyFrozen())
    descent.steps(1)
    life = resume(saved_by(worker, descent), version(0), model=PartlyFrozen())
    assert life.join.versions == (version(0), version(0))
    says_current(broker, version(0))
    life.started()
    broker.hears_nothing_of(Pull, 0.1)
    broker.says(Notice("donate", fragment=1))
    donation, given = broker.takes_push()
    assert donation.base == version(0)
    assert not any(bool(vector.any()) for vector in given.vectors.values())


@pytest.mark.parametrize(
    ("config", "keywords", "after_landing"),
    [
        ({"fragment_sync_delay": 2}, {}, 1000),  # the steps in flight are overwritten
        ({"fragment_sync_delay": 2, "fragment_merge": "rebase"}, {}, 1000 - 2),
        ({"fragment_sync_delay": 2, "fragment_update_alpha": 0.5}, {}, 0.5 * 94 + 500),
        ({}, {"timeout": 0.2}, 1000 - 2),  # it had been let go at the boundary
    ],
)
def test_delta_in_flight_is_offered_again_as_it_was_and_merged_as_it_would_have_been(
    broker: ScriptedBroker,
    beside: Beside,
    begin: Make,
    resume: Resume,
    config: dict[str, Any],
    keywords: dict[str, Any],
    after_landing: float,
) -> None:
    broker.config = run_config(**config)
    worker, descent = begin(**keywords)
    worker.report(tokens=7, samples=3, loss=2.5)
    descent.steps(H + 1)
    earlier = broker.hears(Push)
    life = resume(saved_by(worker, descent), version(0))
    says_current(broker, version(0))
    life.started()
    says_current(broker, version(0))
    push, delta = broker.takes_push()
    assert replace(push, session=b"") == replace(earlier, session=b"")
    assert first(delta) == H
    assert at(life.descent) == 100 - H - 1
    broker.serves(filled(descent, 1000), version(1), push.push_id)
    until(lambda: bool(life.worker._link and life.worker._link.has_news))
    life.descent.steps(1)
    assert at(life.descent) == after_landing
    assert life.worker.sync_count == 1


def test_delta_that_was_let_go_holds_nobody_up_and_no_second_one_grows_over_it(
    broker: ScriptedBroker, beside: Beside, begin: Make, resume: Resume
) -> None:
    worker, descent = begin(timeout=0.2)
    descent.steps(H + 1)  # nobody answers: training goes on from the boundary
    broker.hears(Push)
    life = resume(saved_by(worker, descent), version(0))
    says_current(broker, version(0))
    life.started()
    says_current(broker, version(0))
    push = broker.hears(Push)
    beside(life.descent.steps, H - 2)()
    steps = beside(life.descent.steps, 1)  # the boundary, whose turn is taken: now it waits
    broker.hears_nothing_of(Push, 0.2)
    assert beside.is_busy
    broker.serves(filled(descent, 1000), version(1), push.push_id)
    second, delta = broker.takes_push()
    assert (second.base, second.steps, first(delta)) == (version(1), H, H)
    broker.serves(filled(descent, 50), version(2), second.push_id)
    steps()


def test_order_of_fragments_is_the_workers_own_in_asynchronous_mode(
    broker: ScriptedBroker, beside: Beside, begin: Make, resume: Resume
) -> None:
    broker.config = run_config(mode="async", num_fragments=2)
    worker, descent = begin()
    steps = beside(descent.steps, H // 2)
    push, _ = broker.takes_push()
    assert push.fragment == 0
    broker.serves(filled(descent, 50, broker, 0), version(1), push.push_id)
    steps()
    # Others have pushed meanwhile: the broker is at round 6, which says nothing to this worker.
    life = resume(saved_by(worker, descent), version(1), version(0), first_round=6)
    for fragment, current in ((0, version(1)), (1, version(0))):
        says_current(broker, current, fragment)
    life.started()
    steps = beside(life.descent.steps, H // 2)
    says_current(broker, version(0), fragment=1)
    push, _ = broker.takes_push()
    assert push.fragment == 1
    broker.serves(filled(descent, 50, broker, 1), version(1), push.push_id)
    steps()


def test_delta_that_has_landed_meanwhile_is_merged_in_its_time_and_not_sent(
    broker: ScriptedBroker, begin: Make, resume: Resume
) -> None:
    broker.config = run_config(fragment_sync_delay=2)
    worker, descent = begin()
    descent.steps(H + 1)
    push = broker.hears(Push)
    life = resume(saved_by(worker, descent), version(1))
    broker.hears_pull()
    broker.serves(filled(descent, 1000), version(1), push.push_id)
    life.started()
    assert at(life.descent) == 100 - H - 1, "its apply point has not come"
    life.descent.steps(1)
    assert at(life.descent) == 1000
    assert life.worker.sync_count == 1
    broker.hears_nothing_of(Push, 0.1)


def test_steps_that_nobody_has_counted_keep_their_base_though_the_broker_is_newer(
    broker: ScriptedBroker, beside: Beside, begin: Make, resume: Resume
) -> None:
    worker, descent = begin()
    descent.steps(2)
    life = resume(saved_by(worker, descent), version(3))
    broker.hears_pull()
    broker.serves(filled(descent, 500), version(3), 77, worker="another")
    life.started()
    assert at(life.descent) == 98
    steps = beside(life.descent.steps, 2)
    says_current(broker, version(3))
    push, delta = broker.takes_push()
    assert (push.base, first(delta)) == (version(0), H)
    broker.serves(filled(descent, 400), version(4), push.push_id)
    steps()
    assert at(life.descent) == 400
    assert life.worker.sync_metrics.staleness == 3


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("flight_counted", [False, True])
def test_steps_that_a_later_life_has_sent_give_way_to_the_global_parameters(
    broker: ScriptedBroker,
    beside: Beside,
    begin: Make,
    resume: Resume,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    in_flight: bool,
    flight_counted: bool,
) -> None:
    broker.config = run_config(fragment_sync_delay=3)
    worker, descent = begin()
    descent.steps(H + 1 if in_flight else 2)
    ids = [broker.hears(Push).push_id] if in_flight else []
    audit = tmp_path / "audit"
    life = resume(saved_by(worker, descent), version(3), audit=audit)
    broker.hears_pull()
    counted = [*(ids if flight_counted else []), STRANGER]
    broker.serves(filled(descent, 500), version(3), *counted)
    life.started()
    assert at(life.descent) == 500
    lost = 2 if not in_flight else 1 if flight_counted else H + 1
    assert f"{lost} steps of fragment 0 are left out" in caplog.text
    assert life.worker.sync_count == (in_flight and flight_counted)
    written = audit.read_text()
    assert ('"counted"' in written) == (in_flight and flight_counted)
    assert ('"superseded"' in written) == (in_flight and not flight_counted)
    left = H - 1 if in_flight else 2
    life.descent.steps(left)
    push, delta = broker.takes_push()  # nothing is in doubt: offered without asking
    assert (push.base, push.steps, first(delta)) == (version(3), left, left)


def test_stranger_that_is_counted_later_ends_the_push_before_a_chunk_is_sent(
    broker: ScriptedBroker,
    beside: Beside,
    begin: Make,
    resume: Resume,
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker, descent = begin()
    descent.steps(2)
    life = resume(saved_by(worker, descent), version(0))
    says_current(broker, version(0))
    life.started()
    steps = beside(life.descent.steps, 2)
    says_current(broker, version(0))
    push = broker.hears(Push)
    broker.puts_off(push, 1)
    broker.serves(filled(descent, 700), version(1), STRANGER)
    broker.grants(push, round_=1)
    steps()
    assert at(life.descent) == 700
    assert "4 steps of fragment 0 are left out" in caplog.text
    broker.hears_nothing_of(Chunk, 0.1)
    steps = beside(life.descent.steps, H)
    push, delta = broker.takes_push()
    assert (push.base, first(delta)) == (version(1), H)
    broker.serves(filled(descent, 0), version(2), push.push_id)
    steps()


def test_stranger_that_was_counted_before_the_boundary_keeps_the_push_from_being_offered(
    broker: ScriptedBroker, beside: Beside, begin: Make, resume: Resume
) -> None:
    worker, descent = begin()
    descent.steps(2)
    life = resume(saved_by(worker, descent), version(0))
    says_current(broker, version(0))
    life.started()
    steps = beside(life.descent.steps, 2)
    broker.hears_pull()
    broker.serves(filled(descent, 700), version(1), STRANGER)
    steps()
    assert at(life.descent) == 700
    broker.hears_nothing_of(Push, 0.1)


def test_doubt_outlives_a_broken_connection(
    broker: ScriptedBroker, beside: Beside, begin: Make, resume: Resume
) -> None:
    worker, descent = begin()
    descent.steps(2)
    life = resume(saved_by(worker, descent), version(0))
    says_current(broker, version(0))
    life.started()
    steps = beside(life.descent.steps, 2)
    says_current(broker, version(0))
    broker.hears(Push)
    broker.restart()
    broker.welcomes(version(1))
    broker.hears_pull()
    broker.serves(filled(descent, 700), version(1), STRANGER)
    steps()
    assert at(life.descent) == 700
    broker.hears_nothing_of(Push, 0.1)


def test_connection_that_breaks_before_the_versions_are_compared_is_no_matter(
    broker: ScriptedBroker, begin: Make, resume: Resume
) -> None:
    worker, descent = begin()
    descent.steps(2)
    life = resume(saved_by(worker, descent), version(0))
    broker.hears_pull()
    broker.restart()
    join = broker.welcomes(version(0))
    assert join.versions[0] == version(0)
    says_current(broker, version(0))
    life.started()
    assert at(life.descent) == 98


def test_broker_that_is_behind_is_asked_for_nothing_and_given_what_is_held(
    broker: ScriptedBroker, beside: Beside, begin: Make, resume: Resume
) -> None:
    worker, descent = begin()
    steps = beside(descent.steps, H)
    push, _ = broker.takes_push()
    broker.serves(filled(descent, 500), version(1), push.push_id)
    steps()
    descent.steps(1)
    life = resume(saved_by(worker, descent), version(0))
    life.started()
    assert at(life.descent) == 499
    broker.says(Notice("donate", fragment=0))
    donation, given = broker.takes_push()
    assert (donation.purpose, donation.base, first(given)) == (Purpose.DONATION, version(1), 500)
    assert donation.ledger is not None
    assert donation.ledger.names_whole("me", push.push_id)
    steps = beside(life.descent.steps, H - 1)
    broker.hears_pull()
    broker.serves(filled(descent, 100), version(0))
    push, delta = broker.takes_push()
    assert (push.base, first(delta)) == (version(1), H), "measured from what is held"
    broker.serves(filled(descent, 50), version(1), push.push_id)
    steps()


def test_broker_without_parameters_is_given_those_that_are_held(
    broker: ScriptedBroker, begin: Make, resume: Resume
) -> None:
    worker, descent = begin()
    descent.steps(2)
    life = resume(saved_by(worker, descent))
    broker.says(Notice("donate", fragment=0))
    donation, given = broker.takes_push()
    assert (donation.base, first(given)) == (version(0), 100), "not those of the model"
    broker.says(Released(0, version(0), Ledger()))
    life.started()
    assert at(life.descent) == 98


def test_run_that_was_started_again_in_another_shape_is_joined_as_by_a_new_worker(
    broker: ScriptedBroker, begin: Make, resume: Resume, caplog: pytest.LogCaptureFixture
) -> None:
    worker, descent = begin()
    descent.steps(2)
    saved = saved_by(worker, descent)
    broker.config = run_config(fragment_sync_delay=1)
    life = resume(saved, version(2))
    pull = broker.hears_pull()
    assert pull.held_version is None
    broker.serves(filled(descent, 500), version(2))
    life.started()
    assert at(life.descent) == 500
    assert "it has fragment_sync_delay 0, the run has 1 now" in caplog.text
    assert life.worker.local_step == 2


def test_worker_takes_the_id_that_it_had(
    broker: ScriptedBroker, begin: Make, resume: Resume
) -> None:
    worker, descent = begin()
    life = resume(saved_by(worker, descent), version(0), worker_id=None)
    assert life.join.worker_id == life.worker.worker_id == "me"


def test_worker_with_another_id_takes_over_the_counters_and_nothing_else(
    broker: ScriptedBroker, begin: Make, resume: Resume, caplog: pytest.LogCaptureFixture
) -> None:
    worker, descent = begin()
    descent.steps(2)
    life = resume(saved_by(worker, descent), version(0), worker_id="you")
    assert (life.join.worker_id, life.join.run) == ("you", None)
    assert "state is that of worker 'me', this one is 'you'" in caplog.text
    broker.hears_pull()
    broker.serves(filled(descent, 100), version(0))
    life.started()
    assert at(life.descent) == 100
    assert life.worker.local_step == 2


def test_state_without_parameters_begins_with_those_of_the_run(
    broker: ScriptedBroker, beside: Beside, begin: Make, resume: Resume
) -> None:
    worker, descent = begin()
    descent.steps(1)
    state, tensors = saved_by(worker, descent)
    life = resume(({**state, "resume": None}, tensors), version(0))
    assert life.join.run is None
    broker.hears_pull()
    broker.serves(filled(descent, 100), version(0))
    life.started()
    assert at(life.descent) == 100
    steps = beside(life.descent.steps, H - 1)
    push, _ = broker.takes_push()
    assert push.steps == H - 1, "the place in the cycle is kept"
    broker.serves(filled(descent, 0), version(1), push.push_id)
    steps()


def test_push_in_doubt_is_offered_behind_the_pull_for_the_next_version(ready: Desk) -> None:
    """Then the broker tells of a version before it grants what follows from it."""
    ready.happens(VerifyPushes(0, frozenset()), Offer(gradient(77)))
    assert not ready.sent(Push)
    ready.hears(Released(0, version_of(0), Ledger()))
    sent = [e.message for e in ready.all(Send) if isinstance(e.message, Pull | Push)]
    assert [type(message) for message in sent] == [Pull, Push]
    assert isinstance(sent[0], Pull) and sent[0].after == 0


def test_push_of_a_later_stay_is_a_stranger_no_more_once_one_has_counted(ready: Desk) -> None:
    ready.happens(VerifyPushes(0, frozenset()), Offer(gradient(77)))
    ready.hears(Released(0, version_of(0), Ledger()))
    ready.receives(version_of(1), Ledger({"me": (Counted(77),)}))
    ready.holds(version_of(1))
    ready.happens(Offer(gradient(78, base=1)))
    assert [push.push_id for push in ready.sent(Push)] == [78], "at once"
