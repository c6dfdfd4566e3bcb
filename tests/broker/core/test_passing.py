"""A relay's site: what it sends up, and the versions of its parent's that come down."""

from __future__ import annotations

from diloco_protocol.messages import Chunk, Grant, Released, Standing
from kit.core_harness import a_stage
from kit.noted_tensors import Wire
from kit.site_stage import a_site, as_site, closes, passes


def test_version_of_the_parent_goes_to_the_workers_as_it_is() -> None:
    stage, (a, b) = a_site("a", "b")
    for puppet, push_id in ((a, 1), (b, 2)):
        puppet.pushes(push_id)
        puppet.pulls(after=0)
    closes(stage)
    released = passes(stage, 1, a=1, b=2, elsewhere=3)
    for puppet in (a, b):
        told = puppet.got(Released)
        assert (told.version, told.ledger, told.averaged) == (released.version, released.ledger, 9)
        assert (told.progress, told.loss) == (released.progress, 1.5)
        chunks = [(c.index, wire) for c, wire in puppet.chunks if c.version == released.version]
        assert chunks == [(index, Wire((("parent", index),))) for index in range(2)]
    assert stage.round.number == 1


def test_round_leaps_with_the_version() -> None:
    stage, (a,) = a_site("a")
    a.pushes(1)
    closes(stage)
    passes(stage, 5, a=1)
    assert (stage.round.number, stage.counters) == (5, [5])
    a.pulls()
    assert a.offers(1).standing is Standing.COUNTED
    assert a.offers(2).standing is Standing.NEW


def test_push_that_was_counted_on_another_way_is_no_part_of_the_next_round() -> None:
    stage, (a, b) = a_site("a", "b", quorum=1, grace=0.0)
    stage.state.first_round_pending = False
    a.pushes(1)
    closes(stage)
    b.pushes(2)
    stage.work()
    passes(stage, 1, a=1, b=2)
    assert not list(stage.state.submissions)
    assert stage.state.closing is None
    assert b.offers(2).standing is Standing.COUNTED


def test_push_of_a_relay_of_which_a_part_was_counted_on_another_way_is_over() -> None:
    stage = a_stage(workers=2, relays=True, chunks=2, quorum=1, grace=0.0)
    a, deep = stage.worker("a").joins(), stage.worker("deep").joins(workers=2)
    stage.provide()
    stage.state.first_round_pending = False
    as_site(stage)
    a.pushes(1)
    closes(stage)
    deep.pushes(2, contents={"x": 10, "y": 11}, workers=2)
    stage.work()
    passes(stage, 1, a=1, x=10)
    assert deep.error().code == "contained"
    assert not list(stage.state.submissions)


def test_reader_that_waits_gets_the_version_under_its_own_name() -> None:
    stage, (a,) = a_site("a")
    a.pushes(1)
    closes(stage)
    a.pulls(after=0)
    assert not [c for c, _ in a.chunks if isinstance(c, Chunk) and c.version != stage.version()]
    released = passes(stage, 3, a=1)
    assert a.holds() == released.version
    assert not a.all(Grant)[-1].text
