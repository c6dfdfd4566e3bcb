"""Checkpoints as the core asks for them: when, what waits for one, what goes on without."""

from typing import Any

import pytest

from diloco_broker.core.effects import Finish
from diloco_broker.core.events import Stop
from diloco_broker.storage.checkpoint_format import Checkpoint
from diloco_protocol.messages import Grant, Notice, Released, Standing, Welcome
from kit.core_harness import Puppet, Stage, a_round, a_stage
from kit.restarts import MODES


def a_run(mode: str = "streaming", **options: Any) -> tuple[Stage, Puppet, Puppet]:
    """Two workers, the first checkpoint (before round 0) on the disk."""
    options = {"workers": 2, "chunks": 2, "save_dir": "run", **MODES[mode], **options}
    stage = a_stage(**options)
    a, b = stage.joined("a", "b")
    stage.is_saved()
    return stage, a, b


def makes_a_version(stage: Stage, mode: str) -> None:
    """The first one: a alone makes it in asynchronous mode, else a and b."""
    stage.pushes(**({"a": 1} if mode == "async" else {"a": 1, "b": 2}))


def released(puppet: Puppet) -> list[int]:
    return [message.version.counter for message in puppet.all(Released)]


def versions(saved: Checkpoint) -> list[int]:
    return [each.version.counter for each in saved.record.fragments.values()]


@pytest.mark.parametrize("mode", MODES)
def test_version_is_released_only_when_it_is_on_disk(mode: str) -> None:
    stage, a, b = a_run(mode, durable=True)
    a.pulls(after=0)
    b.pulls(after=0)
    makes_a_version(stage, mode)
    assert stage.saves == [0, 1]
    eye = stage.worker("c").joins()
    eye.pulls()
    assert eye.got(Welcome).versions[0] == stage.version()
    assert stage.version().counter == 0
    assert stage.shown()["totals"]["rounds"] == 0
    assert released(a) == released(b) == released(eye) == [0]
    assert a.offers(1).standing is not Standing.COUNTED
    stage.is_saved()
    assert stage.version().counter == 1
    assert released(a)[-1] == 1
    assert a.got(Released).ledger.names_whole("a", 1)
    assert a.offers(1).standing is Standing.COUNTED


@pytest.mark.parametrize("mode", MODES)
def test_release_is_tried_again_each_second_and_said_once_while_the_disk_is_full(mode: str) -> None:
    stage, *_ = a_run(mode, durable=True)
    makes_a_version(stage, mode)
    for _ in range(5):
        asked = len(stage.saves)
        stage.cannot_save()
        stage.passes(0.8)
        assert len(stage.saves) == asked, "not before a second has passed"
        stage.passes(0.4)
        assert stage.saves[asked:] == [1]
    assert stage.version().counter == 0
    assert len(stage.said("No space left on device")) == 1
    stage.is_saved()
    assert stage.version().counter == 1
    assert len(stage.said("written again")) == 1


@pytest.mark.parametrize("is_written", [True, False])
def test_outcome_of_an_older_checkpoint_releases_and_retries_nothing(is_written: bool) -> None:
    """An operator asked for it; it ends before the one that matters is written."""
    stage, a, b = a_run(durable=True)
    stage.asks("save")
    a_round([a, b], 0)
    stage.is_saved(0) if is_written else stage.cannot_save(number=0)
    assert stage.version().counter == 0
    stage.is_saved(1)
    assert stage.version().counter == 1
    a_round([a, b], 1)
    stage.beats("a", "b")
    stage.passes(3.0)
    assert stage.saves == [0, 0, 1, 2], "it is being written"


def test_round_opens_when_its_predecessor_is_saved_and_takes_what_came_early() -> None:
    stage, a, b = a_run(durable=True)
    a_round([a, b], 0)
    for puppet, push_id in ((a, 11), (b, 12)):
        grant = puppet.offers(push_id, base=stage.version())
        assert (grant.standing, grant.round) == (Standing.WAIT, 1)
    stage.is_saved()
    for puppet in (a, b):
        assert (puppet.got(Grant).standing, puppet.got(Grant).round) == (Standing.NEW, 1)
        puppet.delivers([0, 1])
        puppet.commits()
    assert stage.saves == [0, 1, 2]
    assert stage.version().counter == 1
    stage.is_saved()
    assert stage.version().counter == 2


def test_stop_waits_for_the_release_that_waits_for_its_checkpoint() -> None:
    stage, a, b = a_run(durable=True)
    a.pulls(after=0)
    a_round([a, b], 0)
    stage.happens(Stop("it is time"))
    assert a.got(Notice).what == "shutdown"
    assert not stage.finishes
    stage.cannot_save()
    stage.passes(1.2)
    assert stage.saves == [0, 1, 1], "it is tried again although the broker is stopping"
    stage.is_saved()
    assert released(a) == [0, 1]
    assert stage.finishes == [Finish(None)]


def test_failure_is_said_once_and_so_is_its_end() -> None:
    stage, a, b = a_run()
    for number in range(4):
        a_round([a, b], number)
        stage.cannot_save()
    assert stage.version().counter == 4
    assert stage.saves == [0, 1, 2, 3, 4]
    assert len(stage.said("could not be written", "round 1")) == 1
    stage.cannot_save("Input/output error")
    assert len(stage.said("could not be written")) == 2
    a_round([a, b], 4)
    stage.is_saved()
    a_round([a, b], 5)
    stage.is_saved()
    assert len(stage.said("written again")) == 1
    stage.cannot_save("Read-only file system")
    assert "Read-only file system" in stage.logs[-1]


def test_failed_checkpoint_is_tried_again_after_the_next_round_whatever_save_every_says() -> None:
    stage, a, b = a_run(save_every=3)
    for number in range(3):
        a_round([a, b], number)
    assert stage.saves == [0, 3]
    stage.cannot_save()
    a_round([a, b], 3)
    assert stage.saves == [0, 3, 4]
    stage.is_saved()
    a_round([a, b], 4)
    assert stage.saves == [0, 3, 4]
    a_round([a, b], 5)
    assert stage.saves == [0, 3, 4, 6]


@pytest.mark.parametrize(
    ("every", "saves"), [(1, [0, 1, 2, 3, 4, 5, 6, 7]), (3, [0, 3, 6]), (9, [0])]
)
def test_checkpoints_follow_save_every(every: int, saves: list[int]) -> None:
    stage, a, b = a_run(save_every=every)
    for number in range(7):
        a_round([a, b], number)
    assert stage.saves == saves


def test_operator_gets_a_checkpoint_at_once_between_rounds() -> None:
    stage, a, b = a_run(save_every=5)
    a_round([a, b], 0)
    assert stage.saves == [0]
    a.begins(11)
    assert stage.asks("save").ok
    assert stage.saves == [0, 1]
    assert versions(stage.checkpoints[-1]) == [1]
    assert ("a", 11) not in stage.checkpoints[-1].tensors[0].chunks[0].contents  # type: ignore[attr-defined]


def test_operator_gets_a_checkpoint_of_the_closing_round_when_it_is_complete() -> None:
    stage, a, b = a_run(save_every=5)
    a.begins(1)
    b.begins(2)
    a.delivers([0, 1])
    b.delivers([0])
    assert stage.round.phase.value == "closing"
    assert stage.asks("save").ok
    assert stage.saves == [0], "half of the version is made"
    b.delivers([1])
    assert stage.saves == [0, 1]
    assert versions(stage.checkpoints[-1]) == [1]
    a_round([a, b], 1)
    assert stage.saves == [0, 1], "once"


def test_operator_is_told_why_nothing_is_saved() -> None:
    for save_dir, why in ((None, "--save-dir"), ("run", "no parameters")):
        stage = a_stage(workers=1, chunks=2, save_dir=save_dir)
        result = stage.asks("save")
        assert (result.ok, why in result.text) == (False, True)
        assert not stage.saves
