"""How a run begins where the hub has no parameters and all workers are behind relays."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgpack
import pytest
import torch
from torch import Tensor, nn

from diloco_protocol.errors import Refused
from diloco_protocol.messages import LONGEST_JOIN
from diloco_worker import DiLoCoClient
from kit.process_kit import PATIENCE_S, a_free_address
from kit.raw_worker import Header, RawWorker, one_tensor
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


def test_first_worker_behind_a_relay_gives_the_first_parameters() -> None:
    seeded = Seeded()
    with seeded.sites as sites:
        hub = sites.hub(2, has_model=False)
        north, south = sites.relay(hub, 1, "north"), sites.relay(hub, 1, "south")
        sites.workers(north, "a")
        sites.workers(south, "b")
        assert_same(begun_with(sites, "a"), state_of(0))
        assert_same(begun_with(sites, "b"), state_of(0))
        sites.rounds(range(2), "a", "b")


def test_parameters_come_up_through_relays_behind_relays() -> None:
    seeded = Seeded()
    with seeded.sites as sites:
        hub = sites.hub(1, has_model=False, wire_dtype="int4z", reply_dtype="int4z")
        middle = sites.relay(hub, 1, "middle", dtype=None)
        deep = sites.relay(middle, 2, "deep", dtype=None)
        sites.workers(deep, "a", "b")
        assert_same(begun_with(sites, "b"), state_of(0))
        sites.rounds(range(2), "a", "b")


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


def is_let_in(worker: RawWorker, manifest: Header) -> bool:
    """Ask to join, and take the answer."""
    worker.send("join", worker_id=worker.worker_id, manifest=manifest)
    assert worker.control.poll(int(PATIENCE_S * 1000))
    answer = msgpack.unpackb(worker.control.recv_multipart()[0])
    worker.session = answer.get("session", b"")
    return bool(answer["kind"] == "welcome")


def test_donor_that_dies_is_replaced_by_the_next_worker_of_the_site() -> None:
    with Sites(lambda: nn.Linear(300, 1, bias=False)) as sites:
        hub = sites.hub(1, has_model=False, chunk_elements=100)
        relay = sites.relay(hub, 1, "north")
        with RawWorker(relay.address, "dies") as donor:
            manifest = {"entries": [one_tensor(300)[0] | {"shape": [1, 300]}]}
            until(lambda: is_let_in(donor, manifest), "the relay asks its workers")
            while donor.receive("notice")["what"] != "donate":
                pass
            fields: Header = {
                "fragment": 0,
                "chunks": 3,
                "wire_dtype": "fp32",
                "purpose": "donation",
            }
            donor.send("push", session=donor.session, push_id=41, **fields)
            donor.receive("grant")
            donor.send_chunk(41, 0, bytes(400))
            donor.receive("ack")
        sites.workers(relay, "lives")
        values = begun_with(sites, "lives")["weight"]
        assert values[0, :100].all(), "what the dead one sent is in the run"
        sites.rounds(range(1), "lives")


def test_worker_of_the_site_whose_model_differs_is_refused_while_another_gives_its_own() -> None:
    with Sites() as sites:
        hub = sites.hub(1, has_model=False)
        relay = sites.relay(hub, 2, "north")
        sites.workers(relay, "a")
        with (
            DiLoCoClient(relay.address, worker_id="odd", timeout=PATIENCE_S) as odd,
            pytest.raises(Refused, match="differs"),
        ):
            odd.join(nn.Linear(3, 3))
        sites.workers(relay, "b")
        sites.rounds(range(1), "a", "b")


def test_hub_that_has_lost_its_parameters_takes_those_that_relays_hold() -> None:
    address = a_free_address()
    with Sites() as sites:
        hub = sites.hub(2, bind=address, recover_wait=0.1)
        north, south = sites.relay(address, 1, "north"), sites.relay(address, 1, "south")
        sites.workers(north, "a")
        sites.workers(south, "b")
        before = sites.rounds(range(2), "a", "b")
        hub.stop(restarting=True)
        empty = sites.hub(2, has_model=False, bind=address, recover_wait=20.0)
        until(lambda: empty._loop.core.state.model.is_done, "the hub has parameters")
        theirs, ours = (each._loop.core.state.versions[0] for each in (north, empty))
        assert (ours.version, ours.ledger) == (theirs.version, theirs.ledger)
        assert_same(begun_with(sites, "a"), before)
        sites.rounds(range(2, 4), "a", "b")


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
        until(lambda: empty._loop.core.state.model.is_done, "the hub has parameters")
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
