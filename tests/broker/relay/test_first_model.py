"""What a relay without parameters tells its workers, and what it takes of them for its parent."""

from __future__ import annotations

from diloco_broker.core.events import ModelRefused
from diloco_broker.core.members.start import SEED_PATIENCE_S
from diloco_broker.core.sites.gate import Gate
from diloco_broker.relay.core import held_by
from diloco_protocol.errors import Code
from diloco_protocol.manifest import Manifest
from diloco_protocol.messages import Welcome
from kit.core_harness import Stage, a_config, a_manifest, layered
from kit.restarts import holding

PARENT = "tcp://hub:8512"


def a_site(*, asks: bool = False) -> Stage:
    gate = Gate(PARENT, is_open=asks)
    if asks:
        gate.brings(a_manifest(2))
    return Stage(a_config(2), a_manifest(2), gate=gate)


def brought(site: Stage) -> Manifest | None:
    found: Manifest | None = site.state.gate.brought
    return found


def test_workers_wait_for_the_parent_and_the_first_brings_the_model() -> None:
    site = a_site()
    a = site.worker("a").joins()
    other = site.worker("b").joins(manifest=a_manifest(4))
    for each in (a, other):
        assert (each.error().code, each.error().retry) == (Code.NO_MODEL, True)
        assert PARENT in each.error().text
    assert brought(site) == a_manifest(2)


def test_model_that_the_parent_does_not_take_is_refused_and_the_next_is_brought() -> None:
    site = a_site()
    wrong = site.worker("a").joins()
    site.happens(ModelRefused("The worker's model differs."))
    assert not wrong.joins().error().retry
    assert wrong.error().text == "The worker's model differs."
    site.worker("b").joins(manifest=a_manifest(4))
    assert brought(site) == a_manifest(4)


def test_site_that_is_asked_begins_no_run_of_its_own() -> None:
    site = a_site(asks=True)
    a = site.worker("a").joins()
    assert a.asked_for == [0]
    a.donates()
    assert site.state.seeding.is_complete
    assert not site.state.is_running
    assert a.got(Welcome).run is None
    assert site.state.round is None


def test_seed_worker_that_stands_still_is_passed_over() -> None:
    site = a_site(asks=True)
    a, b = site.worker("a").joins(), site.worker("b").joins()
    a.donates(indexes=[0])
    for _ in range(int(SEED_PATIENCE_S) + 2):
        site.passes(1.0)
        b.beats()
    assert b.asked_for == [0]
    b.donates()
    assert site.state.seeding.is_complete
    assert site.state.seeding.worker_id == "b"


def test_worker_with_another_model_is_refused_while_the_site_is_asked() -> None:
    site = a_site(asks=True)
    odd = site.worker("odd").joins(manifest=a_manifest(4))
    assert odd.error().code == Code.MODEL_DIFFERS
    assert "weight" in odd.error().text
    assert site.worker("a").joins().asked_for == [0]


def test_run_that_a_worker_holds_comes_before_what_a_newcomer_gives() -> None:
    site = a_site(asks=True)
    site.worker("new").joins()
    held = holding(10)
    holder = site.worker("a").comes_with(held)
    assert holder.asked_for == [0]
    holder.donates()
    assert site.state.is_running
    there = held[0]
    assert there is not None
    found = held_by(site.core)
    assert found.keys() == {0}
    assert (found[0].version, found[0].ledger) == (there.version, there.ledger)


def test_site_that_is_asked_cuts_the_model_as_its_parent_does() -> None:
    plan = (2, 0, 1)
    gate = Gate(PARENT, is_open=True, plan=plan)
    site = Stage(a_config(num_fragments=3, sync_every=12), layered(3), gate=gate)
    assert site.worker("a").joins().got(Welcome).plan == plan
