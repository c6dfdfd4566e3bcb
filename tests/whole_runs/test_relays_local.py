"""Sites that take several rounds to one push: what they come to is what plain torch comes to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco_broker.relay.local_rounds import LocalOuter
from diloco_protocol.errors import Refused, Unreachable
from diloco_worker import DiLoCoClient
from kit.sites import Sites, a_model, assert_close, ledger_of, until

PLAIN = LocalOuter(3)
WITH_MOMENTUM = LocalOuter(3, 0.8, 0.5)
HUB: dict[str, Any] = {"outer_lr": 0.5, "outer_momentum": 0.0}


def parameters_of(state: dict[str, Tensor]) -> dict[str, Tensor]:
    names = [name for name, _ in a_model().named_parameters()]
    return {name: state[name] for name in names}


def reference(sites: Sequence[str], rounds: int, outer: LocalOuter) -> dict[str, Tensor]:
    """Parameters after so many pushes of each site, whose workers are named by letters."""
    kit = Sites()
    here = {name: each.detach().clone() for name, each in a_model().named_parameters()}
    momenta = [{name: torch.zeros_like(each) for name, each in here.items()} for _ in sites]
    number = 0
    for _ in range(rounds):
        ways = []
        for workers, momentum in zip(sites, momenta, strict=True):
            at = {name: each.clone() for name, each in here.items()}
            for local in range(outer.rounds):
                deltas = [kit.delta(each, number + local) for each in workers]
                for name in at:
                    mean = torch.stack([each[name] for each in deltas]).mean(0)
                    momentum[name] = outer.momentum * momentum[name] + mean
                    at[name] -= outer.lr * (mean + outer.momentum * momentum[name])
            ways.append({name: here[name] - at[name] for name in here})
        number += outer.rounds
        everybody = sum(map(len, sites))
        for name, before in here.items():
            shares = [len(each) / everybody for each in sites]
            mean = torch.stack([w * way[name] for w, way in zip(shares, ways, strict=True)]).sum(0)
            here[name] = before - HUB["outer_lr"] * mean
    return here


@pytest.mark.slow
@pytest.mark.parametrize("outer", [PLAIN, WITH_MOMENTUM])
def test_sites_step_by_themselves_between_two_pushes(outer: LocalOuter) -> None:
    with Sites() as sites:
        hub = sites.hub(2, **HUB)
        sites.workers(sites.relay(hub, 2, "north", local=outer), "a", "b")
        sites.workers(sites.relay(hub, 1, "south", local=outer), "c")
        for number in range(2 * outer.rounds):
            # Only the last of each three waits for the other site, so each is asked by itself.
            sites.push("a", "b", "c", number=number)
            ours, theirs = sites.pull("a", "b"), sites.pull("c")
        assert_close(ours, theirs)
        assert_close(parameters_of(ours), reference(("ab", "c"), 2, outer))
        assert hub._loop.core.state.totals.pushes == 4
        assert {*"abc", "north", "south"} == ledger_of(hub).keys()


def test_what_weighs_by_tokens_weighs_by_all_of_them() -> None:
    with Sites() as sites:
        hub = sites.hub(2, weight_by="tokens", **HUB)
        sites.workers(sites.relay(hub, 1, "north", local=LocalOuter(2)), "a")
        sites.workers(hub, "b")
        sites.push("b", number=0, tokens=100)
        for number, tokens in enumerate((100, 200)):
            sites.push("a", number=number, tokens=tokens)
            ours = sites.pull("a")
        start = {name: each.detach() for name, each in a_model().named_parameters()}
        first, second, direct = sites.delta("a", 0), sites.delta("a", 1), sites.delta("b", 0)
        expected = {
            name: each - 0.5 * (300 * (first[name] + second[name]) + 100 * direct[name]) / 400
            for name, each in start.items()
        }
        assert_close(parameters_of(ours), expected)


@pytest.mark.slow
def test_what_has_not_gone_up_dies_with_its_relay_and_nothing_counts_twice() -> None:
    with Sites() as sites:
        hub = sites.hub(1, **HUB)
        relay = sites.relay(hub, 1, "north", local=LocalOuter(2), bind="tcp://127.0.0.1:*")
        sites.workers(relay, "a")
        for number in range(3):  # the third is a step of the site's own
            sites.push("a", number=number)
            sites.pull("a")
        address = relay.address
        relay.stop()
        again = sites.relay(hub, 1, "north", local=LocalOuter(2), bind=address)
        until(lambda: again._loop.core.state.members.workers == 1, "the worker is back")
        for number in (4, 5):
            sites.push("a", number=number)
            ours = sites.pull("a")
        assert hub._loop.core.state.totals.pushes == 2
        start = {name: each.detach() for name, each in a_model().named_parameters()}
        deltas = [sites.delta("a", number) for number in (0, 1, 4, 5)]
        expected = {
            name: each - 0.5 * sum((delta[name] for delta in deltas), torch.zeros(()))
            for name, each in start.items()
        }
        assert_close(parameters_of(ours), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "given", [{"mode": "async"}, {"num_fragments": 2, "fragment_sync_delay": 0, "sync_every": 4}]
)
def test_run_of_another_kind_is_refused_with_a_sentence(given: dict[str, Any]) -> None:
    with Sites() as sites:
        hub = sites.hub(1, **given)
        relay = sites.relay(hub, 1, "north", local=LocalOuter(2))
        with (
            DiLoCoClient(relay.address, worker_id="a", timeout=1.0) as client,
            pytest.raises((Refused, Unreachable)),
        ):
            client.join(a_model())
        until(lambda: relay.why_it_failed is not None, "the relay ends")
        assert "one fragment" in (relay.why_it_failed or "")
