"""A broker at each site: the tree comes to what the star comes to, whatever dies in between."""

from __future__ import annotations

from typing import Any

import pytest

from kit.sites import Sites, assert_close, assert_same, ledger_of, star

ROUNDS = range(3)


def test_relays_and_direct_workers_come_to_what_one_broker_does() -> None:
    with Sites() as sites:
        hub = sites.hub(3)
        sites.workers(sites.relay(hub, 2, "north"), "a", "b")
        sites.workers(sites.relay(hub, 3, "south"), "c", "d", "e")
        sites.workers(hub, "f")
        tree = sites.rounds(ROUNDS, *"abcdef")
        assert {*"abcdef", "north", "south"} == ledger_of(hub).keys()
        assert sites.clients["f"].status()["counts"]["averaged"] == 6
    assert_close(tree, star(ROUNDS, *"abcdef"))


@pytest.mark.slow
def test_site_of_one_worker_changes_no_bit() -> None:
    with Sites() as sites:
        hub = sites.hub(2, deterministic=True)
        sites.workers(sites.relay(hub, 1, "r-a"), "a")
        sites.workers(sites.relay(hub, 1, "r-b"), "b")
        tree = sites.rounds(ROUNDS, "a", "b")
    assert_same(tree, star(ROUNDS, "a", "b", deterministic=True))


@pytest.mark.slow
@pytest.mark.parametrize("by", ["tokens", "samples"])
def test_sites_weigh_what_their_workers_weigh(by: str) -> None:
    weights = {"a": 100, "b": 7, "c": 1000}

    def come_to(*, is_tree: bool) -> Any:
        with Sites() as sites:
            hub = sites.hub(2 if is_tree else 3, weight_by=by, relays=is_tree)
            at = sites.relay(hub, 2, "north") if is_tree else hub
            sites.workers(at, "a", "b")
            sites.workers(hub, "c")
            for number in ROUNDS:
                for name, each in weights.items():
                    sites.push(name, number=number, weight=0.5, **{by: each})
                final = sites.pull(*weights)
            return final

    assert_close(come_to(is_tree=True), come_to(is_tree=False))
