"""Frozen parameters: a worker requests them as held, and receives them where they differ."""

import pytest

from diloco_protocol import Ledger, VersionId
from diloco_protocol.messages import Chunk, Message, Pull, Released
from diloco_worker.session.effects import Deliver, NameFrozen
from diloco_worker.session.events import FrozenNamed
from kit.session_harness import FROZEN, Desk, desk, version

OURS = version(0, tag=4711)


def pulls(made: Desk) -> list[Pull]:
    return [pull for pull in made.sent(Pull) if pull.fragment == FROZEN]


@pytest.fixture
def joined() -> Desk:
    return desk(has_frozen=True).connects().is_welcomed(version(0))


def released(of: VersionId) -> Released:
    return Released(FROZEN, of, Ledger())


def test_own_frozen_parameters_are_delivered_without_a_chunk(joined: Desk) -> None:
    assert not pulls(joined)
    assert joined.all(NameFrozen) == [NameFrozen(FROZEN)]
    joined.happens(FrozenNamed(4711))
    (pull,) = pulls(joined)
    assert (pull.held_version, pull.held) == (OURS, b"\x01")
    joined.hears(released(OURS))
    assert joined.effects == [Deliver(released(OURS), None, unchanged=True)]


@pytest.mark.parametrize("chunk_first", [True, False])
def test_other_frozen_parameters_are_fetched(joined: Desk, chunk_first: bool) -> None:
    joined.happens(FrozenNamed(4711))
    theirs = version(0, tag=12)
    both: list[Message] = [released(theirs), Chunk(FROZEN, 0, version=theirs)]
    for message in reversed(both) if chunk_first else both:
        assert not joined.all(Deliver)
        joined.hears(message)
    assert joined.all(Deliver) == [Deliver(released(theirs), None)]


def test_pull_waits_until_there_is_a_run() -> None:
    made = desk(has_frozen=True).connects().is_welcomed(None, None)
    made.happens(FrozenNamed(4711))
    assert not pulls(made)
    made.receives(version(0))
    (pull,) = pulls(made)
    assert pull.held_version == OURS


def test_tag_is_computed_once_over_reconnects(joined: Desk) -> None:
    joined.breaks().is_welcomed(version(0))
    assert not joined.all(NameFrozen)
    joined.happens(FrozenNamed(4711))
    assert [pull.held_version for pull in pulls(joined)] == [OURS]


def test_without_a_tag_the_runs_frozen_parameters_are_fetched(joined: Desk) -> None:
    joined.happens(FrozenNamed(None))
    (pull,) = pulls(joined)
    assert pull.held_version is None
    joined.breaks().is_welcomed(version(0))
    assert len(pulls(joined)) == 1 and not joined.all(NameFrozen)
    joined.hears(released(version(0)), Chunk(FROZEN, 0, version=version(0)))
    assert joined.all(Deliver) == [Deliver(released(version(0)), None)]
