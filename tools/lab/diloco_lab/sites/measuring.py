"""Rounds of two sites: all workers at the hub, or a relay at each site; and what happens when parts die.

Workers are processes with the real hook and a GPT-shaped model; nothing is trained, parameters change
by normal values before a sync (see `bench.roles.trainer`). Bytes are read from the WAN's token buckets.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from diloco_lab.bench.parts.rounds import one_round
from diloco_lab.bench.process_pool import BrokerProcess, ProcessPool, RoleProcess, ask_all
from diloco_lab.bench.sizes import parameters_of
from diloco_lab.sites.network import HUB, LAN, SitesNetwork
from diloco_lab.sites.records import Measurement
from diloco_tools.processes import Child, wait_for_line

SITES, WORKERS = 2, 3  # and so many workers at each
WAN, DELAY_S = 5e7, 0.04  # bits a second, and seconds each way
START_WITHIN_S = 60.0
WAYS_OF_A_HUB = {"star": {}, "whole": {"deterministic": True}, "relays": {"relays": True}}
LAN_DTYPE = "bf16"  # of what workers send to a relay


@dataclass(frozen=True)
class Place:
    """The network of one command, and the processes in it."""

    network: SitesNetwork
    pool: ProcessPool

    def trainers(self) -> list[RoleProcess]:
        """Of all workers, site by site."""
        return [
            self.pool.role("trainer", name, self.network.inside(name))
            for name in self.network.members
            if name.startswith("worker-")
        ]

    def at(self, member: str, port: int | str = "*") -> str:
        return f"{self.network.members[member].address}:{port}"

    @contextlib.contextmanager
    def relays(self, hub: str, wire_dtype: str) -> Iterator[list[str]]:
        """One at each site; their addresses."""
        children: list[Child] = []
        try:
            for site in self.network.sites:
                children.append(self.relay(hub, site, wire_dtype))
            yield [wait_for_line(each, "control", START_WITHIN_S) for each in children]
        finally:
            for each in children:
                each.end()

    def relay(self, hub: str, site: int, wire_dtype: str, port: int | str = "*") -> Child:
        name = f"relay-{site}"
        words = ["relay", "--parent", hub, "--name", name, "--parent-wire-dtype", wire_dtype]
        words += ["--bind", self.at(name, port), "--feed", self.at(name), "--insecure", "--no-ipc"]
        words += ["--workers", str(WORKERS), "--wire-dtype", LAN_DTYPE]
        command = [*self.network.inside(name), sys.executable, "-m", "diloco_broker", *words]
        return self.pool.start(f"{name}-{len(self.pool.all)}", command)


def rounds(place: Place, size: str, pair: tuple[str, str], way: str, repeats: int) -> Measurement:
    """Syncs in which training waits, one after the other, by way of relays or without."""
    network, trainers = place.network, place.trainers()
    network.set_wan(LAN)  # the first copy of the model is not measured
    with _run(place, trainers, size, pair, way) as broker:
        one_round(trainers, broker, normal=True)  # memory is taken for the first time
        network.set_wan(WAN)
        load = os.getloadavg()[0]
        before = [network.carried(site) for site in network.sites]
        found = [one_round(trainers, broker, normal=True).seconds for _ in range(repeats)]
        after = [network.carried(site) for site in network.sites]
        network.set_wan(LAN)
        averaged = broker.wait_for(lambda _: True).counts.averaged
        ask_all(trainers, "leave")
    carried = list(zip(before, after, strict=True))
    return Measurement(
        way=way,
        parameters=parameters_of(size),
        sites=len(network.sites),
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
        at=datetime.now().astimezone().isoformat(timespec="seconds"),
    )


@contextlib.contextmanager
def _run(
    place: Place,
    trainers: Sequence[RoleProcess],
    size: str,
    pair: tuple[str, str],
    way: str,
    **more: object,
) -> Iterator[BrokerProcess]:
    """A run that all have joined, with a boundary behind each step."""
    options: dict[str, Any] = {
        "inside": place.network.inside(HUB),
        "bind": place.at(HUB),
        "insecure": True,
        "sync_every": 1,
        "wire_dtype": pair[0],
        "reply_dtype": pair[1],
        "workers": len(place.network.sites) if way == "relays" else len(trainers),
        **WAYS_OF_A_HUB[way],
        **more,
    }
    with contextlib.ExitStack() as begun:
        broker = begun.enter_context(place.pool.broker(**options))
        servers = [broker.address] * len(place.network.sites)
        if way == "relays":
            servers = begun.enter_context(place.relays(broker.address, pair[0]))
        ask_all(trainers, "build", size=size)
        for number, trainer in enumerate(trainers):
            trainer.tell("join", address=servers[number // WORKERS])
        for trainer in trainers:
            trainer.hear()
        yield broker
