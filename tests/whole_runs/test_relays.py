"""Workers behind relays: the tree comes to what one broker does, and the hub decides who counts."""

from __future__ import annotations

import itertools
import math
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco_broker import Broker
from diloco_broker.relay.daemon import RelayBroker
from diloco_protocol.errors import Refused, Unreachable
from diloco_protocol.messages import LONGEST_JOIN
from diloco_worker import DiLoCoClient
from kit.raw_worker import RawWorker, one_tensor
from kit.sites import (
    Sites,
    a_model,
    assert_close,
    assert_same,
    ledger_of,
    options,
    star,
    until,
)

ROUNDS = range(3)
State = dict[str, Tensor]
Turn = Callable[[Sites, Sequence[int]], State]


def linear() -> nn.Module:
    """Parameters alone: buffers depend on the order of arrival where each push is a step."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 8))


def grow(sites: Sites, hub: Broker) -> None:
    """`a` and `b` behind `north`, `c` behind `south`, `d` behind `deep` behind `south`, `e` direct."""
    sites.workers(sites.relay(hub, "north"), "a", "b")
    south = sites.relay(hub, "south")
    sites.workers(south, "c")
    sites.workers(sites.relay(south, "deep"), "d")
    sites.workers(hub, "e")


def tree(numbers: Sequence[int] = ROUNDS, **given: Any) -> State:
    with Sites() as sites:
        grow(sites, sites.hub(5, **given))
        return sites.rounds(numbers, *"abcde")


# What it comes to.


def test_tree_of_relays_comes_to_what_one_broker_does() -> None:
    with Sites() as sites:
        hub = sites.hub(5)
        grow(sites, hub)
        found = sites.rounds(ROUNDS, *"abcde")
        counted = {name: len(pushes) for name, pushes in ledger_of(hub).items()}
        assert counted == dict.fromkeys("abcde", len(ROUNDS))
        status = sites.clients["e"].status()
        assert status["counts"]["averaged"] == 5
        via = {each["id"]: each["via"] for each in status["workers"]}
    assert via == {"a": "north", "b": "north", "c": "south", "d": "south", "e": ""}
    assert_close(found, star(ROUNDS, *"abcde"))


KINDS: dict[str, dict[str, Any]] = {
    "staged": {"quorum": 5},
    "deterministic": {"deterministic": True},
    "small chunks": {"chunk_elements": 100},
    "median": {"aggregate": "coordinate-median"},
    "trimmed": {"aggregate": "trimmed-mean"},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_tree_comes_to_the_same_in_rounds_of_each_kind(kind: str) -> None:
    assert_close(tree(**KINDS[kind]), star(ROUNDS, *"abcde", **KINDS[kind]))


@pytest.mark.slow
@pytest.mark.parametrize("by", ["tokens", "samples"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_sites_weigh_what_their_workers_weigh(by: str, deterministic: bool) -> None:
    weights = dict(zip("abcde", (100, 7, 1000, 1, 13), strict=True))

    def come_to(begin: Callable[[Sites, Broker], Any], *, relays: bool) -> State:
        with Sites() as sites:
            hub = sites.hub(5, weight_by=by, relays=relays, deterministic=deterministic)
            begin(sites, hub)
            for number in ROUNDS:
                for name, each in weights.items():
                    sites.push(name, number=number, weight=0.5, **{by: each})
                final = sites.pull(*weights)
            return final

    found = come_to(grow, relays=True)
    assert_close(found, come_to(lambda sites, hub: sites.workers(hub, *weights), relays=False))


@pytest.mark.slow
def test_fragments_through_relays_come_to_what_one_broker_does() -> None:
    def come_to(begin: Callable[[Sites, Broker], Any]) -> State:
        final: State = {}
        with Sites() as sites:
            begin(sites, sites.hub(5, num_fragments=2, fragment_sync_delay=0))
            for number in range(4):
                sites.push(*"abcde", number=number, fragment=number % 2)
                final = sites.pull(*"abcde")
        return final

    assert_close(come_to(grow), come_to(lambda sites, hub: sites.workers(hub, *"abcde")))


def test_versions_in_few_bits_are_the_same_at_all_workers_to_the_bit() -> None:
    with Sites() as sites:
        hub = sites.hub(5, reply_dtype="int4z", wire_dtype="int4z", chunk_elements=300)
        grow(sites, hub)
        for number in range(4):
            sites.push(*"abcde", number=number)
            sites.pull(*"abcde")  # which are the same
        assert sites.clients["e"].status()["counts"]["averaged"] == 5


@pytest.mark.slow
@pytest.mark.parametrize("outer", ["dn", "fedbuff", "sgd"])
def test_each_push_counts_by_itself_in_asynchronous_mode(outer: str) -> None:
    """From one base, so that the order of arrival does not matter."""
    steady: dict[str, Any] = {"outer_momentum_warmup": "constant"} if outer != "sgd" else {}

    def come_to(begin: Callable[[Sites, Broker], Any]) -> State:
        with Sites(linear) as sites:
            hub = sites.hub(5, mode="async", outer=outer, **steady)
            begin(sites, hub)
            sites.push(*"abcde", number=0)
            for name in "abcde":
                sites.clients[name].pull()
            version = hub._loop.core.state.versions[0]
            assert version.gradients == 5
            assert version.ledger.pushes.keys() == {*"abcde"}
            return dict(sites.clients["e"].pull().tensors)

    assert_close(come_to(grow), come_to(lambda sites, hub: sites.workers(hub, *"abcde")))


@pytest.mark.slow
def test_few_workers_that_train_fast_through_relays_in_asynchronous_mode_lose_nothing() -> None:
    with Sites(linear) as sites:
        hub = sites.hub(5, mode="async")
        grow(sites, hub)

        def train(name: str) -> None:
            for number in range(6):
                sites.push(name, number=number)
                sites.clients[name].pull()

        with ThreadPoolExecutor(5) as pool:
            assert len(list(pool.map(train, "abcde"))) == 5
        assert hub._loop.core.state.versions[0].gradients == 30


# Order.


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["fp32", "int4z"])
def test_same_tree_comes_to_the_same_bits_whatever_the_order_of_arrival(wire: str) -> None:
    def come_to(seed: int) -> State:
        dice = random.Random(seed)
        with Sites() as sites:
            hub = sites.hub(5, deterministic=True, wire_dtype=wire, chunk_elements=300)
            grow(sites, hub)
            for number in ROUNDS:
                for name in dice.sample("abcde", 5):
                    sites.push(name, number=number)
                final = sites.pull(*"abcde")
            return final

    assert_same(come_to(1), come_to(2))


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["fp32", "bf16", "int4z"])
def test_sites_of_one_worker_change_no_bit(wire: str) -> None:
    given: dict[str, Any] = {"deterministic": True, "wire_dtype": wire}
    with Sites() as sites:
        hub = sites.hub(2, **given)
        sites.workers(sites.relay(hub, "r-a"), "a")
        sites.workers(sites.relay(hub, "r-b"), "b")
        found = sites.rounds(ROUNDS, "a", "b")
    assert_same(found, star(ROUNDS, "a", "b", **given))


# Who counts.


def means(sites: Sites, names: str, number: int) -> State:
    """What `sgd` with a learning rate of 1 subtracts, of deltas of the same weight."""
    made = [sites.delta(name, number) for name in names]
    return {key: torch.stack([each[key] for each in made]).mean(0) for key in made[0]}


PLAIN: dict[str, Any] = {"outer": "sgd", "outer_lr": 1.0, "outer_momentum": 0.0}


def moved(sites: Sites, names: str, number: int) -> State:
    """The model after one round of these, at `PLAIN`."""
    begun, mean = sites._make().state_dict(), means(sites, names, number)
    return {key: value - mean[key] for key, value in begun.items()}


@pytest.mark.slow
def test_round_closes_at_its_quorum_of_workers_wherever_they_are() -> None:
    with Sites(linear) as sites:
        hub = sites.hub(4, quorum=2, grace=0.0, **PLAIN)
        sites.workers(sites.relay(hub, "north"), "a", "b")
        sites.workers(sites.relay(hub, "south"), "c", "d")
        before = sites.rounds(range(1), *"abcd")  # the first waits for all
        sites.push("a", "c", number=1)
        found = sites.pull("a", "c")
        mean = means(sites, "ac", 1)
        assert_close(found, {key: value - mean[key] for key, value in before.items()})
        sites.push("b", number=1)
        sites.push("d", number=1)  # which count in the round after it
        sites.pull("b", "d")
        counted = {name: len(pushes) for name, pushes in ledger_of(hub).items()}
        assert counted == dict.fromkeys("abcd", 2)


@pytest.mark.slow
def test_worker_behind_a_relay_whose_delta_is_too_long_is_refused_alone() -> None:
    with Sites(linear) as sites:
        hub = sites.hub(4, max_delta_norm=1000.0, **PLAIN)
        sites.workers(sites.relay(hub, "north"), "a", "b")
        sites.workers(sites.relay(hub, "south"), "c", "d")
        sites.push(*"acd", number=0)
        long = {key: value * 1000 for key, value in sites.delta("b", 0).items()}

        def push_and_pull() -> None:  # the refusal may be heard with the last chunk, or later
            sites.clients["b"].push(long)
            sites.clients["b"].pull()

        with pytest.raises(Refused, match="1000"):
            push_and_pull()
        found = sites.pull(*"acd")
        assert_close(found, moved(sites, "acd", 0))
        assert ledger_of(hub).keys() == {*"acd"}


class Vector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(40))


def vector() -> nn.Module:
    """In three chunks of 16 and fewer."""
    torch.manual_seed(1)
    return Vector()


@pytest.mark.parametrize("bad", [math.nan, pytest.param(math.inf, marks=pytest.mark.slow)])
def test_value_that_is_not_finite_costs_only_its_worker(bad: float) -> None:
    with Sites(vector) as sites, ExitStack() as opened:
        hub = sites.hub(3, chunk_elements=16, **PLAIN)
        north = sites.relay(hub, "north")
        deep = sites.relay(north, "deep")
        broken = opened.enter_context(RawWorker(deep.address, "a"))
        broken.join(one_tensor(40))
        broken.pull(40)
        sites.workers(north, "b")
        sites.workers(deep, "c")
        sites.push("b", "c", number=0)
        broken.push(1, torch.tensor([bad] + [1.0] * 39))
        assert broken.receive("error")["code"] == "non_finite"
        found = sites.pull("b", "c")
        assert_close(found, moved(sites, "bc", 0))
        assert ledger_of(hub).keys() == {"b", "c"}


@pytest.mark.slow
def test_buffer_of_a_wrong_length_costs_only_its_worker() -> None:
    with Sites(vector) as sites, ExitStack() as opened:
        hub = sites.hub(2, chunk_elements=16, **PLAIN)
        north = sites.relay(hub, "north")
        broken = opened.enter_context(RawWorker(north.address, "a"))
        broken.join(one_tensor(40))
        broken.pull(40)
        sites.workers(north, "b")
        sites.push("b", number=0)
        broken.send(
            "push",
            session=broken.session,
            push_id=1,
            fragment=0,
            chunks=3,
            wire_dtype="fp32",
            base=broken.version,
        )
        broken.receive("grant")
        broken.send_chunk(1, 0, bytes(61))  # no number of elements
        assert broken.receive("error")
        broken.__exit__()
        assert_close(sites.pull("b"), moved(sites, "b", 0))


# How it begins.


def of_seed(seed: int) -> nn.Module:
    """Parameters, a frozen one, float buffers, one that holds an infinity, and an integer one."""
    with ONE_AT_A_TIME:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(24, 24), nn.BatchNorm1d(24), nn.Linear(24, 8))
    model[0].bias.requires_grad_(False)
    model.register_buffer("mask", torch.tensor([0.0, math.inf]))
    return model


ONE_AT_A_TIME = threading.Lock()  # torch draws for all threads from one generator


def begun_with(sites: Sites, name: str) -> State:
    return dict(sites.clients[name].pull().tensors)


def test_run_begins_with_the_parameters_of_one_worker_behind_a_relay() -> None:
    seeds = itertools.count()
    with Sites(lambda: of_seed(next(seeds))) as sites, ThreadPoolExecutor(4) as pool:
        hub = sites.hub(4, has_model=False)
        north = sites.relay(hub, "north")
        at = {"a": north, "b": north, "c": sites.relay(north, "deep"), "d": sites.relay(hub, "s")}
        assert len(list(pool.map(lambda name: sites.workers(at[name], name), at))) == 4
        first = begun_with(sites, "a")
        for name in "bcd":
            assert_same(begun_with(sites, name), first)
        begun = [of_seed(seed).state_dict() for seed in range(4)]
        assert sum(all(torch.equal(first[key], each[key]) for key in first) for each in begun) == 1
        sites.rounds(range(1), *"abcd")


def many_tensors() -> nn.Module:
    """More tensors than a header has room for."""
    model, dice = nn.Module(), torch.Generator().manual_seed(5)
    for number in range(LONGEST_JOIN // 40):
        values = torch.randn(2, generator=dice)
        model.register_parameter(f"parameter_{number}", nn.Parameter(values))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("has_model", [True, False])
def test_model_of_many_tensors_is_described_through_a_relay(has_model: bool) -> None:
    with Sites(many_tensors) as sites, ThreadPoolExecutor(2) as pool:
        relay = sites.relay(sites.hub(2, has_model=has_model), "north")
        assert len(list(pool.map(lambda name: sites.workers(relay, name), "ab"))) == 2
        assert_same(begun_with(sites, "a"), dict(many_tensors().state_dict()))
        sites.rounds(range(1), "a", "b")


# Wrong input.


def a_relay_of(hub: Broker | RelayBroker, name: str, opened: ExitStack) -> RelayBroker:
    """A relay that need not be let in."""
    relay = RelayBroker(options(), hub.address, name=name)
    opened.callback(relay.stop)
    relay.start()
    return relay


@pytest.mark.slow
def test_relay_of_a_hub_that_takes_none_says_so_and_lets_its_workers_wait(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Sites() as sites, ExitStack() as opened:
        hub = sites.hub(1, relays=False)
        relay = a_relay_of(hub, "north", opened)
        until(lambda: "--relays" in caplog.text, "the relay says why")
        with pytest.raises(Unreachable, match="relay"):
            DiLoCoClient(relay.address, worker_id="a", timeout=2.0).join(a_model())
        assert not relay.is_connected


@pytest.mark.slow
def test_second_relay_of_a_name_is_not_let_in_while_the_first_is_here(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Sites() as sites, ExitStack() as opened:
        hub = sites.hub(2)
        sites.workers(sites.relay(hub, "north"), "a", "b")
        other = a_relay_of(hub, "north", opened)
        until(lambda: "--name" in caplog.text, "the second says why")
        sites.rounds(range(2), "a", "b")
        assert not other.is_connected


@pytest.mark.slow
def test_same_worker_name_at_two_relays_is_refused_at_the_second() -> None:
    with Sites() as sites:
        hub = sites.hub(1)
        sites.workers(sites.relay(hub, "north"), "a")
        south = sites.relay(hub, "south")
        with pytest.raises((Refused, Unreachable), match="'a'"):
            DiLoCoClient(south.address, worker_id="a", timeout=2.0).join(a_model())
        sites.rounds(range(1), "a")
