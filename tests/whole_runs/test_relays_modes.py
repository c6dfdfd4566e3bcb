"""Relays with fragments, and in asynchronous mode: the tree comes to what one broker does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kit.sites import Sites, assert_close

EVERYBODY = "abcde"


def linear() -> nn.Module:
    """Parameters alone: buffers in asynchronous mode depend on the order of arrival."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 8))


def turns(sites: Sites, numbers: range, *names: str, pieces: int) -> dict[str, Tensor]:
    """In each of these rounds everybody pushes its fragment, and pulls what comes of it."""
    final: dict[str, Tensor] = {}
    for number in numbers:
        sites.push(*names, number=number, fragment=number % pieces)
        final = sites.pull(*names)
    return final


def of_fragments(*, is_tree: bool, pieces: int) -> dict[str, Tensor]:
    with Sites() as sites:
        hub = sites.hub(3 if is_tree else 5, num_fragments=pieces, fragment_sync_delay=0)
        if is_tree:
            middle = sites.relay(hub, 2, "middle")
            sites.workers(middle, "a")
            sites.workers(sites.relay(middle, 1, "deep"), "b")
            sites.workers(sites.relay(hub, 2, "south"), "c", "d")
            sites.workers(hub, "e")
        else:
            sites.workers(hub, *EVERYBODY)
        return turns(sites, range(2 * pieces), *EVERYBODY, pieces=pieces)


@pytest.mark.slow
def test_fragments_through_relays_come_to_what_one_broker_does() -> None:
    assert_close(of_fragments(is_tree=True, pieces=2), of_fragments(is_tree=False, pieces=2))


def test_site_sends_fragments_up_while_earlier_ones_are_on_their_way() -> None:
    with Sites() as sites:
        hub = sites.hub(2, num_fragments=2, fragment_sync_delay=0)
        north = sites.relay(hub, 2, "north")
        sites.workers(north, "a", "b")
        sites.workers(hub, "c")
        sites.push("a", "b", number=0, fragment=0)
        sites.push("a", "b", number=1, fragment=1)
        sites.push("c", number=0, fragment=0)
        sites.push("c", number=1, fragment=1)
        early = sites.pull("a", "b", "c")
    with Sites() as sites:
        sites.workers(sites.hub(3, num_fragments=2, fragment_sync_delay=0), "a", "b", "c")
        expected = turns(sites, range(2), "a", "b", "c", pieces=2)
    assert_close(early, expected)


def from_one_base(outer: str, groups: tuple[str, ...], **of_sites: Any) -> dict[str, Tensor]:
    """Each of `EVERYBODY` pushes once from the first version: those of a group behind a relay."""
    with Sites(linear) as sites:
        steady: dict[str, Any] = {"outer_momentum_warmup": "constant"} if outer != "sgd" else {}
        hub = sites.hub(len(EVERYBODY), mode="async", outer=outer, recover_wait=0.0, **steady)
        for number, group in enumerate(groups):
            relay = sites.relay(hub, len(group), f"site-{number}", mode="async", **of_sites)
            sites.workers(relay, *group)
        direct = [name for name in EVERYBODY if name not in "".join(groups)]
        sites.workers(hub, *direct)
        sites.push(*EVERYBODY, number=0)
        for name in EVERYBODY:
            sites.clients[name].pull()
        hub_has = hub._loop.core.state.versions[0]
        assert hub_has.gradients == len(EVERYBODY)
        assert set(EVERYBODY) <= hub_has.ledger.pushes.keys()
        return dict(sites.clients[EVERYBODY[-1]].pull().tensors)


@pytest.mark.slow
@pytest.mark.parametrize("outer", ["dn", "fedbuff", "sgd"])
def test_pushes_from_one_base_come_to_the_same_however_they_are_grouped(outer: str) -> None:
    grouped = from_one_base(outer, ("abc", "d"), grace=0.5)
    assert_close(grouped, from_one_base(outer, ()))
