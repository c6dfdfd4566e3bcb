"""Workers behind relays: the result of one broker over fewer bytes; bad input costs only its sender."""

import itertools
import math
import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco_broker import Broker
from diloco_protocol.errors import Refused, Unreachable
from diloco_protocol.messages import LONGEST_JOIN
from diloco_tools.tcp_proxy import Gate, TcpProxy
from diloco_worker import DiLoCoClient
from kit.process_kit import wait_for
from kit.raw_worker import RawWorker, one_tensor
from kit.sites import Sites, a_model, assert_close, assert_same, ledger_of, star

ROUNDS = range(3)
State = dict[str, Tensor]


def tree(sites: Sites, hub: Broker) -> None:
    """`a` and `b` behind `north`, `c` behind `south`, `d` behind `deep` behind `south`, `e` direct."""
    sites.workers(sites.relay(hub, "north"), "a", "b")
    south = sites.relay(hub, "south")
    sites.workers(south, "c")
    sites.workers(sites.relay(south, "deep"), "d")
    sites.workers(hub, "e")


def through_tree(*, order: random.Random | None = None, **given: Any) -> State:
    """The parameters after the rounds. `order` draws in which order the workers push."""
    with Sites() as sites:
        tree(sites, sites.hub(5, **given))
        for number in ROUNDS:
            names = order.sample("abcde", 5) if order else "abcde"
            final = sites.rounds([number], *names)
    return final


def test_tree_of_relays_has_the_result_of_one_broker() -> None:
    with Sites() as sites:
        hub = sites.hub(5)
        tree(sites, hub)
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
    "fragments": {"num_fragments": 2, "fragment_sync_delay": 0},
    "small chunks": {"chunk_elements": 100},
    "median": {"aggregate": "coordinate-median"},
    "rda": {"aggregate": "rda", "chunk_elements": 100},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_tree_has_the_result_of_one_broker_in_rounds_of_each_kind(kind: str) -> None:
    assert_close(through_tree(**KINDS[kind]), star(ROUNDS, *"abcde", **KINDS[kind]))


def test_quantized_versions_are_the_same_at_all_workers_to_the_bit() -> None:
    """`Sites.pull` compares them after each round."""
    through_tree(reply_dtype="int4z", wire_dtype="int4z", chunk_elements=300)


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["fp32", "int4z"])
def test_order_of_arrival_changes_no_bit_in_deterministic_rounds(wire: str) -> None:
    given: dict[str, Any] = {"deterministic": True, "wire_dtype": wire, "chunk_elements": 300}
    one, other = (through_tree(order=random.Random(seed), **given) for seed in (1, 2))
    assert_same(one, other)


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


class Vector(nn.Module):
    """A parameter in three chunks of at most 16 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(40))


# The first value of the push, or None for a chunk that has no whole number of elements.
BAD_PUSHES = [
    (math.nan, "non_finite"),
    pytest.param(1e4, "too_large", marks=pytest.mark.slow),
    pytest.param(None, "bad_chunk", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("bad", "code"), BAD_PUSHES)
def test_bad_push_costs_only_its_worker(bad: float | None, code: str) -> None:
    plain: dict[str, Any] = {"outer": "sgd", "outer_lr": 1.0, "outer_momentum": 0.0}
    if code == "too_large":
        plain["max_delta_norm"] = 1000.0
    with Sites(Vector) as sites, ExitStack() as opened:
        hub = sites.hub(3, chunk_elements=16, **plain)
        north = sites.relay(hub, "north")
        deep = sites.relay(north, "deep")
        broken = opened.enter_context(RawWorker(deep.address, "a"))
        broken.join(one_tensor(40))
        broken.pull(40)
        sites.workers(north, "b")
        sites.workers(deep, "c")
        sites.push("b", "c", number=0)
        if bad is None:
            push: dict[str, Any] = {"push_id": 1, "fragment": 0, "chunks": 3, "wire_dtype": "fp32"}
            broken.send("push", session=broken.session, base=broken.version, **push)
            broken.receive("grant")
            broken.send_chunk(1, 0, bytes(61))
        else:
            broken.push(1, torch.tensor([bad] + [1.0] * 39))
        assert broken.receive("error")["code"] == code
        if bad is None:  # the push may go on with a good chunk, so the round waits for it
            broken.__exit__()
        mean = (sites.delta("b", 0)["weight"] + sites.delta("c", 0)["weight"]) / 2
        assert_close(sites.pull("b", "c"), {"weight": torch.ones(40) - mean})
        assert ledger_of(hub).keys() == {"b", "c"}


def of_seed(seed: int) -> nn.Module:
    """Parameters, a frozen one, float buffers, one that holds an infinity, and an integer one."""
    with ONE_AT_A_TIME:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(24, 24), nn.BatchNorm1d(24), nn.Linear(24, 8))
    model[0].bias.requires_grad_(False)
    model.register_buffer("mask", torch.tensor([0.0, math.inf]))
    return model


ONE_AT_A_TIME = threading.Lock()  # torch draws for all threads from one generator


def test_run_begins_with_the_parameters_of_one_worker_behind_a_relay() -> None:
    seeds = itertools.count()
    with Sites(lambda: of_seed(next(seeds))) as sites, ThreadPoolExecutor(4) as pool:
        hub = sites.hub(4, has_model=False)
        north = sites.relay(hub, "north")
        at = {"a": north, "b": north, "c": sites.relay(north, "deep"), "d": sites.relay(hub, "s")}
        assert len(list(pool.map(lambda name: sites.workers(at[name], name), at))) == 4
        first = dict(sites.clients["a"].pull().tensors)
        for name in "bcd":
            assert_same(sites.clients[name].pull().tensors, first)
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
        assert_same(dict(sites.clients["a"].pull().tensors), dict(many_tensors().state_dict()))
        sites.rounds(range(1), "a", "b")


@pytest.mark.slow
def test_relay_of_a_hub_that_takes_none_lets_no_worker_in(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Sites() as sites:
        relay = sites.begin_relay(sites.hub(1, relays=False), "north")
        wait_for(lambda: "--relays" in caplog.text)
        with pytest.raises(Unreachable, match="relay"):
            DiLoCoClient(relay.address, worker_id="a", timeout=2.0).join(a_model())
        assert not relay.is_connected


@pytest.mark.slow
def test_second_relay_or_worker_of_a_name_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Sites() as sites:
        hub = sites.hub(2)
        sites.workers(sites.relay(hub, "north"), "a", "b")
        other = sites.begin_relay(hub, "north")
        wait_for(lambda: "--name" in caplog.text)
        south = sites.relay(hub, "south")
        with pytest.raises((Refused, Unreachable), match="'a'"):
            DiLoCoClient(south.address, worker_id="a", timeout=2.0).join(a_model())
        sites.rounds(range(2), "a", "b")
        assert not other.is_connected


WIDTH = 512  # 262,144 parameters


class CountingProxy(TcpProxy):
    """Counts the bytes that pass, by direction."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.bytes: Counter[bool] = Counter()  # by whether it is up

    def gate(self, connection: int, up: bool) -> Gate:
        def gate(data: bytes) -> tuple[bytes, bool]:
            self.bytes[up] += len(data)
            return data, False

        return gate


def wide() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(WIDTH, WIDTH, bias=False)


def bits_of_a_round(*, is_deep: bool = False, **of_hub: Any) -> tuple[float, float]:
    """Bits of a parameter, up and down, on the line between a site of three workers and its hub."""
    rounds = range(1, 4)
    with Sites(wide) as sites:
        hub = sites.hub(3, **of_hub)
        with CountingProxy(hub.address) as line:
            north = sites.relay(line.address, "north")
            sites.workers(north, "a")
            sites.workers(sites.relay(north, "deep") if is_deep else north, "b", "c")
            sites.rounds(range(1), "a", "b", "c")
            before = line.bytes.copy()
            sites.rounds(rounds, "a", "b", "c")
            spent = {up: line.bytes[up] - before[up] for up in (True, False)}
            north.stop()
    each = len(rounds) * WIDTH * WIDTH / 8
    return spent[True] / each, spent[False] / each


# int4z takes 1.9 to 2.2 bits in training, and about 2.2 of normal values with all that is said.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("wire", "reply", "up", "down", "is_deep"),
    [
        ("bf16", "fp32", (16, 16.5), (32, 32.5), True),
        ("int4z", "int4z", (1.8, 2.3), (1.8, 2.3), False),
    ],
    ids=["bf16 and fp32, relay behind it, in order", "int4z, streaming"],
)
def test_line_of_a_site_carries_one_push_and_one_version_a_round(
    wire: str, reply: str, up: tuple[float, float], down: tuple[float, float], is_deep: bool
) -> None:
    bits = bits_of_a_round(
        is_deep=is_deep, deterministic=is_deep, wire_dtype=wire, reply_dtype=reply
    )
    for found, (least, most) in zip(bits, (up, down), strict=True):
        assert least <= found < most


@pytest.mark.slow
def test_each_push_goes_over_the_line_where_the_hub_needs_each_by_itself() -> None:
    up, down = bits_of_a_round(aggregate="coordinate-median", wire_dtype="bf16", reply_dtype="fp32")
    assert 3 * 16 <= up < 3 * 16.5
    assert 32 <= down < 32.5
