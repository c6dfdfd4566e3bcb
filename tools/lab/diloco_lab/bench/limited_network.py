"""A network of this machine's kernel in which each member has a line of a given rate.

The broker and each worker have a network namespace of their own. A pair of interfaces leads from each
into one more namespace, where a bridge joins them as a switch would. Both ends of a pair put their
packets through a token bucket (`tc tbf`), so a line has its rate in each direction by itself, as a
full-duplex line has, and a queue in front of it that drops what is too much. There is no delay worth
naming. Nothing of it is seen from the machine's own network, so no address can be in anybody's way.

It takes root, `ip`, `tc` and a kernel that has these things. All of it is removed at the end; what a
killed process has left, the next one removes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

WITHIN_S = 10.0  # of each command: they take milliseconds
BURST_S = (
    0.002  # of what a line carries leaves at once: so much of a transfer the rate does not hold
)
LEAST_BURST = 16_000  # bytes: some packets of 1500
QUEUE = "20ms"  # how long a packet may wait for its turn before it is dropped
PREFIX = "diloco-net"
NETWORK = "198.18.0"  # 198.18.0.0/15 is for benchmarks: RFC 2544
MOST_MEMBERS = 250  # with one number each in the last part of an address
LINE = "line"  # the interface of each member
NAMES = Path("/run/netns")  # where `ip netns` keeps them: ip-netns(8)


class NoNetwork(Exception):
    """There can be no such network here; the message says why."""


class Carried(NamedTuple):
    """Bytes that a line has carried since it was made, with the headers of TCP, IP and Ethernet."""

    up: int  # away from the member
    down: int


class LimitedNetwork:
    """Member 0 is the broker, the others are workers. Made by `limited_network`."""

    def __init__(self, name: str, members: int) -> None:
        self._name = name
        self.members = members
        self.address = f"tcp://{NETWORK}.1"  # of the broker, for a port behind a colon
        self.rates: tuple[float, ...] = ()

    @property
    def hub(self) -> str:
        return f"{self._name}-hub"

    def namespace(self, member: int) -> str:
        return f"{self._name}-{member}"

    def inside(self, member: int) -> tuple[str, ...]:
        """The command that runs another one where this member is, in its own place (exec)."""
        return ("ip", "netns", "exec", self.namespace(member))

    def set_rates(self, broker: float, workers: Sequence[float]) -> None:
        """Bits a second of each line, each way, from now on; connections stay."""
        self.rates = (broker, *workers)
        for member, rate in enumerate(self.rates):
            burst = max(LEAST_BURST, int(BURST_S * rate / 8))
            limit = f"tbf rate {rate:.0f}bit burst {burst} latency {QUEUE}".split()
            for namespace, interface in self._ends(member):
                run("tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root", *limit)

    def carried(self, member: int) -> Carried:
        """What its two token buckets have let through."""
        return Carried(*(self._through(*end) for end in self._ends(member)))

    def _ends(self, member: int) -> tuple[tuple[str, str], tuple[str, str]]:
        """Namespace and interface of those that send away from it, and to it."""
        return (self.namespace(member), LINE), (self.hub, f"port{member}")

    def _through(self, namespace: str, interface: str) -> int:
        said = run("tc", "-s", "-j", "-n", namespace, "qdisc", "show", "dev", interface)
        return int(json.loads(said)[0]["bytes"])


def broker_options(network: LimitedNetwork) -> dict[str, Any]:
    """For `ProcessPool.broker`: where it runs, and that there everybody may come."""
    return {"inside": network.inside(0), "bind": f"{network.address}:*", "insecure": True}


def why_not() -> str:
    """Why there can be none here; empty where nothing is known to be in the way."""
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            return f"the command {command!r} is missing; it comes with the package iproute2"
    if os.geteuid() != 0:
        return "making a network namespace takes root"
    return ""


@contextlib.contextmanager
def limited_network(broker: float, workers: Sequence[float]) -> Iterator[LimitedNetwork]:
    """One with lines of these rates, in bits a second each way; one worker for each rate.

    Raises:
        NoNetwork: with nothing left behind.
    """
    if reason := why_not():
        raise NoNetwork(reason)
    if len(workers) > MOST_MEMBERS:
        raise NoNetwork(f"{len(workers)} workers are too many: {MOST_MEMBERS} fit in")
    remove_abandoned()
    network = LimitedNetwork(f"{PREFIX}-{os.getpid()}", 1 + len(workers))
    with contextlib.ExitStack() as made:

        def add(namespace: str) -> None:
            run("ip", "netns", "add", namespace)
            # Interfaces go with the namespace, and a pair with either of its ends.
            made.callback(remove, namespace)

        add(network.hub)
        hub = ("ip", "-n", network.hub)
        run(*hub, "link", "add", "bridge", "type", "bridge")
        run(*hub, "link", "set", "bridge", "up")
        for member in range(network.members):
            namespace, port = network.namespace(member), f"port{member}"
            add(namespace)
            peer = ("peer", "name", LINE, "netns", namespace)
            run(*hub, "link", "add", port, "type", "veth", *peer)
            run(*hub, "link", "set", port, "master", "bridge", "up")
            own = ("ip", "-n", namespace)
            run(*own, "address", "add", f"{NETWORK}.{member + 1}/24", "dev", LINE)
            run(*own, "link", "set", LINE, "up")
            run(*own, "link", "set", "lo", "up")
        network.set_rates(broker, workers)
        yield network


def remove_abandoned() -> None:
    """Remove what processes have left that were killed: their names have the process in them."""
    for path in NAMES.glob(f"{PREFIX}-*-*"):
        owner = path.name.removeprefix(f"{PREFIX}-").partition("-")[0]
        if owner.isdecimal() and not Path(f"/proc/{owner}").exists():
            remove(path.name)


def remove(namespace: str) -> None:
    """What cannot be removed now is left to the next run; nothing that was measured is lost for it."""
    with contextlib.suppress(NoNetwork):
        run("ip", "netns", "delete", namespace)


def run(*command: str) -> str:
    """What a command says; raises NoNetwork with what it complains of."""
    try:
        done = subprocess.run(
            command,
            check=True,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            start_new_session=True,  # Ctrl-C is for us: what it interrupted would be left half done
        )
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines() or ["no reason given"]
        raise NoNetwork(f"{' '.join(command)!r} failed: {said[0]}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoNetwork(f"{' '.join(command)!r} failed: {error}") from None
    return done.stdout
