"""A network of this machine's kernel with sites: fast lines inside of each, a slow one to the rest.

Each member has a network namespace of its own, and a line to the switch of where it is: the site's, or
that of the hub. From the switch of each site one line leads to that of the hub; this is what is called
the WAN here. Lines have a rate in each direction (`tc tbf`); those of the WAN have a delay, too, which a
process between their two ends makes (`delay`), since not every kernel can. Nothing of it is seen from
the machine's own network, and all of it is removed at the end. It takes root.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from diloco_lab.bench.limited_network import (
    BURST_S,
    LEAST_BURST,
    LINE,
    PREFIX,
    Carried,
    NoNetwork,
    remove,
    remove_abandoned,
    run,
    why_not,
)
from diloco_tools.processes import Children, wait_for_line

NETWORK = "198.18.0"  # 198.18.0.0/15 is for benchmarks: RFC 2544
LAN_QUEUE_MS, WAN_QUEUE_MS = 20, 100  # how long a packet may wait before it is dropped
READY_WITHIN_S = 20.0
LAN, HUB, STANDBY = 1e9, "hub", "standby"
SWITCH = "switch"


@dataclass(frozen=True)
class Member:
    """One with a line of its own."""

    name: str
    site: int | None  # None: where the hub is
    number: int  # the last part of its address

    @property
    def address(self) -> str:
        """For a port behind a colon."""
        return f"tcp://{NETWORK}.{self.number}"


class SitesNetwork:
    """Made by `sites_network`. Members: `hub` and `standby`, of site i `relay-i` and `worker-i-k`."""

    def __init__(self, name: str, sites: int, workers: int) -> None:
        self._name, self.sites = name, range(sites)
        everybody = [Member(HUB, None, 1), Member(STANDBY, None, 2)]
        for site in self.sites:
            first = 10 * (site + 1)
            everybody.append(Member(f"relay-{site}", site, first))
            everybody += [Member(f"worker-{site}-{k}", site, first + 1 + k) for k in range(workers)]
        self.members = {each.name: each for each in everybody}
        self.rate = LAN  # of the WAN

    def namespace(self, name: str) -> str:
        return f"{self._name}-{name}"

    def inside(self, member: str) -> tuple[str, ...]:
        """The command that runs another one where this member is, in its own place (exec)."""
        return ("ip", "netns", "exec", self.namespace(member))

    def switch_of(self, site: int | None) -> str:
        return self.namespace(SWITCH if site is None else f"{SWITCH}-{site}")

    def wan_ends(self, site: int) -> tuple[tuple[str, str], tuple[str, str]]:
        """Namespace and interface of what sends away from a site, and to it."""
        return (self.switch_of(site), f"away{site}"), (self.switch_of(None), f"to{site}")

    def set_wan(self, bits_per_s: float) -> None:
        """The rate of each site's line to the hub, each way, from now on; connections stay."""
        self.rate = bits_per_s
        for site in self.sites:
            for end in self.wan_ends(site):
                limit(*end, bits_per_s, WAN_QUEUE_MS)

    def cut(self, site: int) -> None:
        """Nothing comes through any more, either way, and nobody is told."""
        self._set(site, "down")

    def mend(self, site: int) -> None:
        self._set(site, "up")

    def _set(self, site: int, state: str) -> None:
        for namespace, interface in self.wan_ends(site):
            run("ip", "-n", namespace, "link", "set", interface, state)

    def carried(self, site: int) -> Carried:
        """Bytes of a site's line to the hub so far, with the headers of TCP, IP and Ethernet."""
        return Carried(*(_through(*end) for end in self.wan_ends(site)))


def limit(namespace: str, interface: str, bits_per_s: float, queue_ms: int) -> None:
    burst = max(LEAST_BURST, int(BURST_S * bits_per_s / 8))
    how = f"tbf rate {bits_per_s:.0f}bit burst {burst} latency {queue_ms}ms".split()
    run("tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root", *how)


def _through(namespace: str, interface: str) -> int:
    said = run("tc", "-s", "-j", "-n", namespace, "qdisc", "show", "dev", interface)
    return int(json.loads(said)[0]["bytes"])


@contextlib.contextmanager
def sites_network(
    folder: Path, *, sites: int, workers: int, wan: float, delay_s: float
) -> Iterator[SitesNetwork]:
    """One with so many sites of so many workers; `wan` in bits a second, `delay_s` each way.

    Logs of the processes that make the delay go into the folder.

    Raises:
        NoNetwork: there can be none here; nothing is left behind.
    """
    if reason := why_not():
        raise NoNetwork(reason)
    if not Path("/dev/net/tun").exists():
        raise NoNetwork("this kernel has no tun/tap interfaces, which make the delay")
    remove_abandoned()
    network = SitesNetwork(f"{PREFIX}-{os.getpid()}", sites, workers)
    with contextlib.ExitStack() as made, Children(folder) as lines:
        for site in (None, *network.sites):
            _add_switch(network, site, made)
        for member in network.members.values():
            _add_member(network, member, made)
        for site in network.sites:
            _add_wan(network, site, lines, delay_s)
        network.set_wan(wan)
        yield network


def _add_switch(network: SitesNetwork, site: int | None, made: contextlib.ExitStack) -> None:
    namespace = network.switch_of(site)
    run("ip", "netns", "add", namespace)
    made.callback(remove, namespace)
    run("ip", "-n", namespace, "link", "add", "bridge", "type", "bridge")
    run("ip", "-n", namespace, "link", "set", "bridge", "up")


def _add_member(network: SitesNetwork, member: Member, made: contextlib.ExitStack) -> None:
    switch, namespace = network.switch_of(member.site), network.namespace(member.name)
    port = f"port{member.number}"
    run("ip", "netns", "add", namespace)
    made.callback(remove, namespace)
    peer = ("peer", "name", LINE, "netns", namespace)
    run("ip", "-n", switch, "link", "add", port, "type", "veth", *peer)
    run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
    own = ("ip", "-n", namespace)
    run(*own, "address", "add", f"{NETWORK}.{member.number}/24", "dev", LINE)
    run(*own, "link", "set", LINE, "up")
    run(*own, "link", "set", "lo", "up")
    for end in ((switch, port), (namespace, LINE)):
        limit(*end, LAN, LAN_QUEUE_MS)


def _add_wan(network: SitesNetwork, site: int, lines: Children, delay_s: float) -> None:
    (away, its), (hub, ours) = network.wan_ends(site)
    command = [sys.executable, "-m", "diloco_lab.sites.delay", its, ours, f"{delay_s}"]
    child = lines.start(f"wan-{site}", ["ip", "netns", "exec", hub, *command])
    wait_for_line(child, "ready", READY_WITHIN_S)
    run("ip", "-n", hub, "link", "set", its, "netns", away)  # who reads from it keeps it
    for namespace, interface in network.wan_ends(site):
        run("ip", "-n", namespace, "link", "set", interface, "master", "bridge", "up")
