"""A network of this machine's kernel with a limited rate: a namespace behind a pair of interfaces.

Both ends put their packets through a token bucket (`tc tbf`), so each direction has its own rate, as a
full-duplex line has. It adds no delay worth naming. It takes root, `ip`, `tc` and a kernel that has the
token bucket; all of it is removed at the end.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

WITHIN_S = 10.0  # of each command: they take milliseconds
BURST = "256kb"  # what leaves at once: four of the largest packets that the kernel makes
QUEUE = "20ms"  # how long a packet may wait for its turn before it is dropped


class NoNetwork(Exception):
    """There can be no such network here; the message says why."""


class LimitedNetwork(NamedTuple):
    address: str  # of this end, where a broker is to listen
    inside: tuple[str, ...]  # the command that runs another one at the far end


@contextlib.contextmanager
def limited_network(bits_per_s: float) -> Iterator[LimitedNetwork]:
    """One of this rate each way; raises NoNetwork, with nothing left behind."""
    if os.geteuid() != 0:
        raise NoNetwork("making a network namespace takes root")
    own = os.getpid()
    name, near, far = f"diloco-bench-{own}", f"dlb{own}a", f"dlb{own}b"
    inside = ("ip", "netns", "exec", name)
    network = f"198.18.{own % 256}"  # 198.18.0.0/15 is for benchmarks: RFC 2544
    with contextlib.ExitStack() as made:
        _run("ip", "netns", "add", name)
        made.callback(_run, "ip", "netns", "delete", name)
        _run("ip", "link", "add", near, "type", "veth", "peer", "name", far)
        # Both interfaces of a pair go when one does.
        made.callback(_run, "ip", "link", "delete", near)
        _run("ip", "link", "set", far, "netns", name)
        for interface, host, at in ((near, 1, ()), (far, 2, inside)):
            _run(*at, "ip", "address", "add", f"{network}.{host}/24", "dev", interface)
            _run(*at, "ip", "link", "set", interface, "up")
            limit = f"tbf rate {bits_per_s:.0f}bit burst {BURST} latency {QUEUE}".split()
            _run(*at, "tc", "qdisc", "add", "dev", interface, "root", *limit)
        yield LimitedNetwork(f"tcp://{network}.1", inside)


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=WITHIN_S)
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines() or ["no reason given"]
        raise NoNetwork(f"{' '.join(command)!r} failed: {said[0]}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoNetwork(f"{' '.join(command)!r} failed: {error}") from None
