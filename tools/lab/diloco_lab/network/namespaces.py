"""A network of this machine's kernel: lines of given rates, at one switch or at several sites.

Each member has a network namespace of its own. A pair of interfaces (veth) connects it to the switch of
its site, a bridge in one more namespace; members without a site are at the hub's switch. Both ends of a
pair send through a token bucket (`tc tbf`), so each direction has its rate, as a full-duplex line, and a
bounded queue. A line connects the switch of each site to that of the hub: the WAN. It has a rate and a
delay, made by a process between its ends (`delay`), since not every kernel has `netem`. The machine's
own network does not change.

It needs root, `ip`, `tc` and a kernel that supports these. Everything is removed at the end; the
leftovers of a killed process are removed by the next.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from diloco_lab.bench.process_pool import ProcessPool
from diloco_lab.driver.roles import RoleProcess
from diloco_tools.processes import Children, wait_for_line

WITHIN_S = 10.0  # for each command: they take milliseconds
READY_WITHIN_S = 20.0  # for a process that makes a delay
BURST_S = 0.002  # of traffic that may leave at once, without regard to the rate
LEAST_BURST = 16_000  # bytes: a few packets of 1500
QUEUE_MS, WAN_QUEUE_MS = 20, 100  # longest wait of a packet before it is dropped
PREFIX = "diloco-net"
NETWORK = "198.18.0"  # 198.18.0.0/15 is for benchmarks: RFC 2544
LINE = "line"  # the interface of each member
NAMES = Path("/run/netns")  # where `ip netns` keeps them: ip-netns(8)
HUB, STANDBY = "hub", "standby"
FAST = 1e9  # bits a second, of lines whose rate does not matter


class NoNetwork(Exception):
    """No such network can be made here; the message says why."""


class Carried(NamedTuple):
    """Bytes that a line has carried since its creation, with the headers of TCP, IP and Ethernet."""

    up: int  # away from the member, or from the site
    down: int


@dataclass(frozen=True)
class Member:
    """A process's place in the network.

    Attributes:
        number: the last byte of its address.
        site: None at the hub's switch.
    """

    name: str
    number: int
    site: int | None = None

    @property
    def address(self) -> str:
        """Without a port."""
        return f"tcp://{NETWORK}.{self.number}"


def one_switch(workers: int) -> list[Member]:
    """The hub and these workers (`worker-1`, ...), all at one switch."""
    return [Member(HUB, 1), *(Member(f"worker-{n}", n + 1) for n in range(1, workers + 1))]


def several_sites(sites: int, workers: int) -> list[Member]:
    """A hub and a standby; at site i a relay (`relay-i`) and workers (`worker-i-k`)."""
    members = [Member(HUB, 1), Member(STANDBY, 2)]
    for site in range(sites):
        first = 10 * (site + 1)
        members.append(Member(f"relay-{site}", first, site))
        members += [Member(f"worker-{site}-{k}", first + 1 + k, site) for k in range(workers)]
    return members


End = tuple[str, str]  # namespace and interface


class Network:
    """Made by `network`."""

    def __init__(self, name: str, members: Sequence[Member]) -> None:
        self._name = name
        self.members = {each.name: each for each in members}
        self.sites = sorted({each.site for each in members if each.site is not None})
        self.rates: dict[str, float] = {}  # of each member's line, bits a second

    @property
    def workers(self) -> list[str]:
        """Names, in the order of the members."""
        return [name for name in self.members if name.startswith("worker-")]

    def at(self, member: str, port: int | str = "*") -> str:
        """An address of this member."""
        return f"{self.members[member].address}:{port}"

    def inside(self, member: str) -> tuple[str, ...]:
        """The command that runs another one at this member, by exec."""
        return ("ip", "netns", "exec", self.namespace(member))

    def namespace(self, name: str) -> str:
        return f"{self._name}-{name}"

    def switch_of(self, site: int | None) -> str:
        """The namespace of a site's switch."""
        return self.namespace("switch" if site is None else f"switch-{site}")

    def set_rates(self, rates: Mapping[str, float]) -> None:
        """Set the bits a second of these members' lines, each way; connections remain."""
        self.rates |= rates
        for member, rate in rates.items():
            for end in self.ends_of(member):
                _limit(end, rate, QUEUE_MS)

    def carried(self, member: str) -> Carried:
        """The bytes through the two token buckets of a member's line."""
        return Carried(*map(_through, self.ends_of(member)))

    def ends_of(self, member: str) -> tuple[End, End]:
        """The ends of a member's line that send away from it, and to it."""
        of = self.members[member]
        return (self.namespace(member), LINE), (self.switch_of(of.site), f"port{of.number}")

    def set_wan(self, bits_per_s: float) -> None:
        """Set the rate of each site's line to the hub, each way; connections remain."""
        for site in self.sites:
            for end in self.wan_ends_of(site):
                _limit(end, bits_per_s, WAN_QUEUE_MS)

    def wan_carried(self, site: int) -> Carried:
        """The bytes through the token buckets of a site's line to the hub."""
        return Carried(*map(_through, self.wan_ends_of(site)))

    def wan_ends_of(self, site: int) -> tuple[End, End]:
        """The ends of a site's line that send away from the site, and to it."""
        return (self.switch_of(site), f"away{site}"), (self.switch_of(None), f"to{site}")

    def cut(self, site: int) -> None:
        """Drop everything on a site's line to the hub, both ways, without notice."""
        self._set_wan_state(site, "down")

    def mend(self, site: int) -> None:
        self._set_wan_state(site, "up")

    def _set_wan_state(self, site: int, state: str) -> None:
        for namespace, interface in self.wan_ends_of(site):
            run("ip", "-n", namespace, "link", "set", interface, state)


@contextlib.contextmanager
def network(
    members: Sequence[Member], rate: float = FAST, *, folder: Path | None = None, delay_s: float = 0
) -> Iterator[Network]:
    """A network of these members, each with a line of this rate, in bits a second each way.

    Args:
        folder: for the logs of the processes that make the WAN's delay; needed with sites.
        delay_s: of the WAN, each way.

    Raises:
        NoNetwork: it cannot be made here; nothing is left behind.
    """
    made = Network(f"{PREFIX}-{os.getpid()}", members)
    if reason := why_not():
        raise NoNetwork(reason)
    if made.sites and not Path("/dev/net/tun").exists():
        raise NoNetwork("this kernel has no tun/tap interfaces, which make the delay")
    remove_abandoned()
    with contextlib.ExitStack() as stack:
        for site in (None, *made.sites):
            switch = made.switch_of(site)
            _add_namespace(switch, stack)
            run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
            run("ip", "-n", switch, "link", "set", "bridge", "up")
        for member in members:
            _add_member(made, member, stack)
        if made.sites:
            assert folder is not None
            lines = stack.enter_context(Children(folder))
            for site in made.sites:
                _add_wan(made, site, lines, delay_s)
        made.set_rates(dict.fromkeys(made.members, rate))
        made.set_wan(FAST)
        yield made


def why_not() -> str:
    """Why no network can be made here; empty without a known obstacle."""
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            return f"the command {command!r} is missing; it comes with the package iproute2"
    if os.geteuid() != 0:
        return "making a network namespace needs root"
    return ""


def remove_abandoned() -> None:
    """Remove the namespaces of processes that were killed: their names contain the process id."""
    for path in NAMES.glob(f"{PREFIX}-*-*"):
        owner = path.name.removeprefix(f"{PREFIX}-").partition("-")[0]
        if owner.isdecimal() and not Path(f"/proc/{owner}").exists():
            _remove(path.name)


def run(*command: str) -> str:
    """The output of a command; raises NoNetwork with its error."""
    try:
        done = subprocess.run(
            command,
            check=True,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            start_new_session=True,  # so that Ctrl-C does not interrupt it halfway
        )
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines() or ["no reason given"]
        raise NoNetwork(f"{' '.join(command)!r} failed: {said[0]}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoNetwork(f"{' '.join(command)!r} failed: {error}") from None
    return done.stdout


def _add_namespace(name: str, stack: contextlib.ExitStack) -> None:
    run("ip", "netns", "add", name)
    # Interfaces are removed with the namespace, and a pair with either end.
    stack.callback(_remove, name)


def _add_member(network: Network, member: Member, stack: contextlib.ExitStack) -> None:
    (namespace, _), (switch, port) = network.ends_of(member.name)
    _add_namespace(namespace, stack)
    peer = ("peer", "name", LINE, "netns", namespace)
    run("ip", "-n", switch, "link", "add", port, "type", "veth", *peer)
    run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
    own = ("ip", "-n", namespace)
    run(*own, "address", "add", f"{NETWORK}.{member.number}/24", "dev", LINE)
    run(*own, "link", "set", LINE, "up")
    run(*own, "link", "set", "lo", "up")


def _add_wan(network: Network, site: int, lines: Children, delay_s: float) -> None:
    (away, its), (hub, ours) = network.wan_ends_of(site)
    command = [sys.executable, "-m", "diloco_lab.network.delay", its, ours, f"{delay_s}"]
    child = lines.start(f"wan-{site}", ["ip", "netns", "exec", hub, *command])
    wait_for_line(child, "ready", READY_WITHIN_S)
    run("ip", "-n", hub, "link", "set", its, "netns", away)  # the process that reads it keeps it
    for namespace, interface in network.wan_ends_of(site):
        run("ip", "-n", namespace, "link", "set", interface, "master", "bridge", "up")


def _limit(end: End, bits_per_s: float, queue_ms: int) -> None:
    namespace, interface = end
    burst = max(LEAST_BURST, int(BURST_S * bits_per_s / 8))
    how = f"tbf rate {bits_per_s:.0f}bit burst {burst} latency {queue_ms}ms".split()
    run("tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root", *how)


def _through(end: End) -> int:
    namespace, interface = end
    said = run("tc", "-s", "-j", "-n", namespace, "qdisc", "show", "dev", interface)
    return int(json.loads(said)[0]["bytes"])


def _remove(namespace: str) -> None:
    """Remove it, or leave it to the next run: the measurements are valid all the same."""
    with contextlib.suppress(NoNetwork):
        run("ip", "netns", "delete", namespace)


class Place(NamedTuple):
    """A network and the processes in it."""

    network: Network
    pool: ProcessPool

    def role(self, role: str, member: str) -> RoleProcess:
        """The process that plays this role at this member."""
        return self.pool.role(role, f"{role}-{member}", self.network.inside(member))

    def trainers(self, count: int | None = None) -> list[RoleProcess]:
        """Those of the first workers, or of all."""
        return [self.role("trainer", name) for name in self.network.workers[:count]]


def at_the_hub(network: Network) -> dict[str, Any]:
    """Options of `ProcessPool.broker` for a broker at the hub that accepts every connection."""
    return {"inside": network.inside(HUB), "bind": network.at(HUB), "insecure": True}


def dtypes(pair: tuple[str, str]) -> dict[str, Any]:
    """The options of a broker for codecs up and down."""
    return {"wire_dtype": pair[0], "reply_dtype": pair[1]}


def now() -> str:
    """The time for a record."""
    return datetime.now().astimezone().isoformat(timespec="seconds")
