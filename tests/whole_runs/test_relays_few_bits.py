"""Between a site and its parent chunks travel in few bits, and nothing of what was learnt is lost."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco_broker.relay.daemon import RelayBroker
from diloco_tools.tcp_proxy import Gate, TcpProxy
from kit.process_kit import a_free_address
from kit.sites import Sites, ledger_of, until

CHUNK = 300
SGD: dict[str, Any] = {"outer": "sgd", "outer_lr": 1.0, "outer_momentum": 0.0}


def zeros() -> nn.Module:
    """A model without values, of three chunks, so that sums are exact."""
    model = nn.Linear(700, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def two_layers() -> nn.Module:
    model = nn.Sequential(nn.Linear(350, 1, bias=False), nn.Linear(350, 1, bias=False))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def residual_of(relay: RelayBroker, fragment: int = 0) -> Tensor:
    """Of the parameters of a fragment, as one vector."""
    tensors = relay._relay_loop._relay_tensors
    chunks = tensors.residuals.of(fragment)
    return torch.cat([chunks[at] for at in sorted(chunks)])


def dyadic(name: str, number: int, size: int = 700) -> Tensor:
    dice = torch.Generator().manual_seed(100 * number + sum(map(ord, name)))
    return torch.randint(-64, 65, (1, size), generator=dice) / 16


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["int4z", "top64"])
def test_what_sites_learnt_is_in_the_parameters_and_in_their_residuals(wire: str) -> None:
    """At an outer step that takes the mean as it is: sum of means = what was counted + residuals."""
    with Sites(zeros) as sites:
        hub = sites.hub(2, chunk_elements=CHUNK, **SGD)
        relays = [sites.relay(hub, 2, name, dtype=wire) for name in ("north", "south")]
        sites.workers(relays[0], "a", "b")
        sites.workers(relays[1], "c", "d")
        learnt = torch.zeros(1, 700)
        for number in range(4):
            for name in "abcd":
                delta = dyadic(name, number)
                learnt += delta / 4
                sites.clients[name].push({"weight": delta})
            final = sites.pull(*"abcd")
            left = torch.stack([residual_of(relay) for relay in relays]).mean(0)
            assert torch.equal(learnt.flatten(), left - final["weight"].flatten())
        assert left.any()


@pytest.mark.slow
def test_each_fragment_has_a_residual_of_its_own() -> None:
    with Sites(two_layers) as sites:
        hub = sites.hub(1, chunk_elements=CHUNK, num_fragments=2, fragment_sync_delay=0, **SGD)
        relay = sites.relay(hub, 2, "north", dtype="int4")
        sites.workers(relay, "a", "b")
        layouts = [hub._loop.core.state.versions[each].layout for each in range(2)]
        names = [layout.places[0].entry.name for layout in layouts]
        learnt = torch.zeros(2, 350)
        for number in range(6):
            fragment = number % 2
            for name in "ab":
                delta = dyadic(name, number, 350)
                learnt[fragment] += delta[0] / 2
                sites.clients[name].push({names[fragment]: delta}, fragment=fragment)
            final = sites.pull("a", "b")
            left = residual_of(relay, fragment)
            assert torch.equal(learnt[fragment], left - final[names[fragment]][0])


def test_versions_that_come_as_differences_are_the_parents_to_the_bit() -> None:
    with Sites() as sites:
        hub = sites.hub(2, reply_dtype="int4z", chunk_elements=CHUNK)
        north = sites.relay(hub, 2, "north", dtype="int4z")
        deep = sites.relay(north, 1, "deep", dtype="int4")
        sites.workers(north, "a")
        sites.workers(deep, "b")
        sites.workers(hub, "c")
        for number in range(4):
            sites.push("a", "b", "c", number=number)
            sites.pull("a", "b", "c")  # which are the same
        assert ledger_of(hub).keys() == {*"abc", "north", "deep"}


@pytest.mark.slow
@pytest.mark.parametrize(("reply", "goes_on"), [("int4z", True), ("bf16", False)])
def test_hub_that_comes_back_with_another_dtype_of_parameters(reply: str, goes_on: bool) -> None:
    """Few bits come to fp32 at the relay, as before; a site cannot change from fp32 to bf16."""
    address = a_free_address()
    with Sites() as sites:
        hub = sites.hub(1, bind=address, recover_wait=0.1)
        relay = sites.relay(address, 1, "north")
        sites.workers(relay, "a")
        sites.rounds(range(2), "a")
        hub.stop(restarting=True)
        sites.hub(1, has_model=False, bind=address, recover_wait=5.0, reply_dtype=reply)
        if goes_on:
            sites.rounds(range(2, 5), "a")
        else:
            until(lambda: relay.why_it_failed is not None, "the relay ends")
            assert "relay" in str(relay.why_it_failed)


# Bytes.


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


WIDTH = 512  # 262,144 parameters


def wide() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(WIDTH, WIDTH, bias=False)


def bits_of_a_round(dtype: str, **of_hub: Any) -> tuple[float, float]:
    """Bits of a parameter, up and down, on the line between a site of three workers and its hub."""
    rounds = range(1, 4)
    with Sites(wide) as sites:
        hub = sites.hub(1, **of_hub)
        with CountingProxy(hub.address) as line:
            relay = sites.relay(line.address, 3, "north", dtype=dtype)
            sites.workers(relay, "a", "b", "c")
            sites.rounds(range(1), "a", "b", "c")
            before = line.bytes.copy()
            sites.rounds(rounds, "a", "b", "c")
            spent = {up: line.bytes[up] - before[up] for up in (True, False)}
            relay.stop()
    each = len(rounds) * WIDTH * WIDTH / 8
    return spent[True] / each, spent[False] / each


# int4z takes 1.9 to 2.2 bits in training, and about 2.2 of normal values with all that is said.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("wire", "reply", "up", "down"),
    [("bf16", "fp32", (16, 16.5), (32, 32.5)), ("int4z", "int4z", (1.8, 2.3), (1.8, 2.3))],
)
def test_line_of_a_site_carries_one_push_and_one_version_a_round(
    wire: str, reply: str, up: tuple[float, float], down: tuple[float, float]
) -> None:
    for found, (least, most) in zip(
        bits_of_a_round(wire, reply_dtype=reply), (up, down), strict=True
    ):
        assert least <= found < most
