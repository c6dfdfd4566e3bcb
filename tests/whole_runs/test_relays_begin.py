"""How a run begins where the hub has no parameters and all workers are behind relays."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco_protocol.messages import LONGEST_JOIN
from kit.process_kit import PATIENCE_S, a_free_address
from kit.sites import Sites, assert_same, until

State = dict[str, Tensor]


ONE_AT_A_TIME = threading.Lock()  # torch draws for all threads from one generator


def of_seed(seed: int) -> nn.Module:
    """Parameters, a frozen one, float buffers, one that holds an infinity, and an integer one."""
    with ONE_AT_A_TIME:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(24, 24), nn.BatchNorm1d(24), nn.Linear(24, 8))
    model[0].bias.requires_grad_(False)
    model.register_buffer("mask", torch.tensor([0.0, float("inf")]))
    return model


def state_of(seed: int) -> State:
    return dict(of_seed(seed).state_dict())


class Seeded:
    """Sites whose workers have models of their own: each made differs from those before."""

    def __init__(self) -> None:
        self.numbers = itertools.count()
        self.sites = Sites(lambda: of_seed(next(self.numbers)))


def begun_with(sites: Sites, name: str) -> State:
    return dict(sites.clients[name].pull().tensors)


def test_of_two_sites_that_begin_at_once_one_gives_and_both_have_the_same() -> None:
    seeded = Seeded()
    with seeded.sites as sites, ThreadPoolExecutor(4) as pool:
        hub = sites.hub(2, has_model=False)
        relays = {name: sites.relay(hub, 2, name) for name in ("north", "south")}
        places = {"a": "north", "b": "north", "c": "south", "d": "south"}
        found = pool.map(lambda name: sites.workers(relays[places[name]], name), places)
        assert len(list(found)) == 4
        first = begun_with(sites, "a")
        for name in "bcd":
            assert_same(begun_with(sites, name), first)
        begun = [state_of(seed) for seed in range(4)]
        same = [all(torch.equal(first[name], each[name]) for name in first) for each in begun]
        assert sum(same) == 1
        sites.rounds(range(1), *"abcd")


@pytest.mark.slow
@pytest.mark.parametrize("reply", ["bf16", "int4z"])
def test_hub_and_relay_that_have_both_lost_them_take_those_that_workers_hold(reply: str) -> None:
    at_hub, at_site = a_free_address(), a_free_address()
    dtypes: dict[str, Any] = {"reply_dtype": reply, "wire_dtype": "bf16", "bind": at_hub}
    with Sites(lambda: of_seed(7)) as sites:
        hub = sites.hub(1, recover_wait=0.1, **dtypes)
        relay = sites.relay(at_hub, 2, "north", dtype=None, bind=at_site)
        sites.workers(relay, "a", "b")
        before = sites.rounds(range(2), "a", "b")
        sites.push("a", number=2)
        version = relay._loop.core.state.versions[0].version
        relay.stop(restarting=True)
        hub.stop(restarting=True)
        empty = sites.hub(1, has_model=False, recover_wait=1.0, **dtypes)
        sites.relay(at_hub, 2, "north", dtype=None, bind=at_site)
        until(lambda: empty._loop.core.state.is_running, "the hub has parameters")
        assert empty._loop.core.state.versions[0].version == version
        sites.push("b", number=2)
        after = sites.pull("a", "b")
        assert not torch.equal(before["0.weight"], after["0.weight"])
        sites.rounds(range(3, 4), "a", "b")


def many_tensors() -> nn.Module:
    """More tensors than a header has room for."""
    model, dice = nn.Module(), torch.Generator().manual_seed(5)
    for number in range(LONGEST_JOIN // 40):
        values = torch.randn(2, generator=dice)
        model.register_parameter(f"parameter_{number}", nn.Parameter(values))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("has_model", [True, False])
def test_model_of_many_tensors_is_the_first_that_a_relay_hears_of(has_model: bool) -> None:
    with Sites(many_tensors) as sites:
        hub = sites.hub(1, has_model=has_model)
        relay = sites.relay(hub, 2, "north")
        both = threading.Barrier(2)

        def join(name: str) -> None:
            both.wait(PATIENCE_S)
            sites.workers(relay, name)

        with ThreadPoolExecutor(2) as pool:
            assert len(list(pool.map(join, "ab"))) == 2
        assert_same(begun_with(sites, "a"), dict(many_tensors().state_dict()))
        sites.rounds(range(1), "a", "b")
