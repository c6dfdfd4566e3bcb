"""Rounds of two sites: all workers at the hub, or a relay at each site.

Workers are processes with the real hook and a GPT-shaped model; nothing is trained, parameters change
by normal values before a sync (see `bench.roles.trainer`). Bytes are read from the WAN's token buckets.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

from diloco_lab.bench.parts.rounds import one_round
from diloco_lab.bench.sizes import parameters_of
from diloco_lab.driver.options import START_WITHIN_S, broker_command
from diloco_lab.driver.roles import RoleProcess, ask_all
from diloco_lab.network.namespaces import FAST, Place, at_the_hub, dtypes, now
from diloco_lab.network.sites.tables import Measurement
from diloco_tools.processes import Child, wait_for_line

SITES, WORKERS = 2, 3  # workers at each site
WAN, DELAY_S = 5e7, 0.04  # bits a second, and seconds each way
WAYS = {
    "star": {},
    "whole": {"deterministic": True},
    "relays": {"relays": True},
}  # the hub's options


def start_relay(place: Place, hub: str, site: int, wire_dtype: str, port: int | str = "*") -> Child:
    """Start a site's relay; its parent is at `hub`."""
    name, network = f"relay-{site}", place.network
    command = broker_command(
        "relay",
        inside=network.inside(name),
        parent=hub,
        name=name,
        parent_wire_dtype=wire_dtype,
        bind=network.at(name, port),
        feed=network.at(name),
        insecure=True,
    )
    return place.pool.start(f"{name}-{len(place.pool.all)}", command)


def join(trainers: Sequence[RoleProcess], size: str, servers: Sequence[str]) -> None:
    """Have all workers join with a model of this size, those of a site at its server."""
    ask_all(trainers, "build", size=size)
    for number, trainer in enumerate(
        trainers
    ):  # all before the first answer: they wait for each other
        trainer.tell("join", address=servers[number // WORKERS])
    for trainer in trainers:
        trainer.hear()


def rounds(place: Place, size: str, pair: tuple[str, str], repeats: int) -> Iterator[Measurement]:
    """Syncs in which training waits, one after the other, with and without relays."""
    for way in WAYS:
        yield _rounds(place, size, pair, way, repeats)


def _rounds(place: Place, size: str, pair: tuple[str, str], way: str, repeats: int) -> Measurement:
    network, trainers = place.network, place.trainers()
    network.set_wan(FAST)  # the first copy of the model is not measured
    options = {**at_the_hub(network), **dtypes(pair), "sync_every": 1, **WAYS[way]}
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(place.pool.broker(workers=len(trainers), **options))
        servers = [broker.address] * SITES
        if way == "relays":
            relays = [start_relay(place, broker.address, site, pair[0]) for site in range(SITES)]
            for each in relays:
                stack.callback(each.end)
            servers = [wait_for_line(each, "control", START_WITHIN_S) for each in relays]
        join(trainers, size, servers)
        one_round(trainers, broker, normal=True)  # allocates memory
        network.set_wan(WAN)
        load = os.getloadavg()[0]
        before = [network.wan_carried(site) for site in network.sites]
        found = [one_round(trainers, broker, normal=True).seconds for _ in range(repeats)]
        after = [network.wan_carried(site) for site in network.sites]
        network.set_wan(FAST)
        averaged = broker.wait_for(lambda _: True).counts.averaged
        ask_all(trainers, "leave")
    carried = list(zip(before, after, strict=True))
    return Measurement(
        way=way,
        parameters=parameters_of(size),
        sites=SITES,
        workers=len(trainers),
        wire_dtype=pair[0],
        reply_dtype=pair[1],
        wan_bits_per_s=WAN,
        delay_s=DELAY_S,
        seconds=tuple(found),
        bytes_up=sum(now.up - then.up for then, now in carried) / repeats,
        bytes_down=sum(now.down - then.down for then, now in carried) / repeats,
        averaged=averaged,
        load=load,
        at=now(),
    )
