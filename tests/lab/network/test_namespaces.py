"""Networks of the kernel with limited rates: do lines carry what goes over them, and is all removed?"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco_lab.network import namespaces
from diloco_lab.network.namespaces import (
    HUB,
    Network,
    NoNetwork,
    network,
    one_switch,
    remove_abandoned,
    run,
    several_sites,
    why_not,
)
from kit.limited_networks import network_or_skip

MOVED = 300_000  # bytes: some times what a line lets through at once
# Takes all bytes that come to port 1000, of one connection, and answers with how many they were.
TAKE = """
import socket
server = socket.create_server(("198.18.0.1", 1000))
print("ready", flush=True)
connection, _ = server.accept()
taken = 0
while piece := connection.recv(65536):
    taken += len(piece)
connection.sendall(str(taken).encode())
"""
# Prints how many bytes arrived, and the seconds until there was a connection.
GIVE = f"""
import socket, time
began = time.monotonic()
connection = socket.create_connection(("198.18.0.1", 1000), 20)
connected = time.monotonic() - began
connection.settimeout(30)
connection.sendall(bytes({MOVED}))
connection.shutdown(socket.SHUT_WR)
print(connection.recv(100).decode(), connected)
"""
# A packet to the hub and back: it answers that the port is closed.
PING = """
import socket
end = socket.socket()
end.settimeout(0.5)
raise SystemExit(end.connect_ex(("198.18.0.1", 9)) != 111)
"""
DELAY_S = 0.03


@contextlib.contextmanager
def a_network(workers: int = 1, **rates: float) -> Iterator[Network]:
    """One switch."""
    with network_or_skip(one_switch(workers)) as made:
        made.set_rates({name.replace("_", "-"): rate for name, rate in rates.items()})
        yield made


@contextlib.contextmanager
def two_sites(folder: Path) -> Iterator[Network]:
    """Two sites of one worker behind slow lines."""
    with network_or_skip(several_sites(2, 1), folder=folder, delay_s=DELAY_S) as made:
        made.set_wan(2e7)
        yield made


def own_namespaces() -> list[str]:
    """Of this process, as the system lists them."""
    return [path.name for path in namespaces.NAMES.glob(f"{namespaces.PREFIX}-{os.getpid()}-*")]


def rates(of: Network, member: str) -> list[int]:
    """Bits a second of both ends of a line, as the kernel has them."""
    found = []
    for namespace, interface in of.ends_of(member):
        said = run("tc", "-j", "-n", namespace, "qdisc", "show", "dev", interface)
        (bucket,) = json.loads(said)
        assert bucket["kind"] == "tbf"
        found.append(8 * bucket["options"]["rate"])  # tc has bytes a second
    return found


def move(of: Network, member: str) -> tuple[int, float]:
    """Bytes that arrived at the hub of those that a member sent, and seconds until it was connected."""
    python = (sys.executable, "-c")
    with subprocess.Popen([*of.inside(HUB), *python, TAKE], stdout=subprocess.PIPE) as taker:
        try:
            assert taker.stdout is not None and taker.stdout.readline() == b"ready\n"
            give = [*of.inside(member), *python, GIVE]
            arrived, seconds = subprocess.check_output(give, timeout=60).split()
            return int(arrived), float(seconds)
        finally:
            taker.kill()


def test_lines_have_their_rates_and_count_what_they_carry() -> None:
    with a_network(2, worker_1=1e8, worker_2=5e7) as made:
        assert {name: rates(made, name) for name in made.members} == {
            HUB: [10**9] * 2,
            "worker-1": [10**8] * 2,
            "worker-2": [5 * 10**7] * 2,
        }
        before = {name: made.carried(name) for name in made.members}
        assert move(made, "worker-1")[0] == MOVED
        after = {name: made.carried(name) for name in made.members}
        up = {name: after[name].up - before[name].up for name in made.members}
        down = {name: after[name].down - before[name].down for name in made.members}
        # Headers are a twentieth; resent bytes and the other direction are few.
        assert MOVED < up["worker-1"] < 1.2 * MOVED
        assert MOVED < down[HUB] < 1.2 * MOVED
        assert max(up[HUB], down["worker-1"]) < 0.2 * MOVED
        assert max(up["worker-2"], down["worker-2"]) < 0.05 * MOVED


def test_line_of_a_site_has_its_delay_and_counts_its_bytes(tmp_path: Path) -> None:
    with two_sites(tmp_path) as made:
        _, until_connected = move(made, "worker-0-0")
        there, elsewhere = made.wan_carried(0), made.wan_carried(1)
    assert until_connected >= 2 * DELAY_S
    assert MOVED < there.up < 1.2 * MOVED
    assert there.down < MOVED / 5  # acknowledgements
    assert elsewhere.up < MOVED / 10
    assert own_namespaces() == []


def test_line_that_is_cut_carries_nothing_and_everything_after(tmp_path: Path) -> None:
    with two_sites(tmp_path) as made:
        ping = [*made.inside("worker-0-0"), sys.executable, "-c", PING]
        made.cut(0)
        assert subprocess.run(ping, check=False, timeout=20).returncode != 0
        made.mend(0)
        deadline = time.monotonic() + 20
        while subprocess.run(ping, check=False, timeout=20).returncode != 0:
            assert time.monotonic() < deadline, "the line is mended, and carries nothing"


def test_nothing_of_it_is_in_the_machines_own_network_and_all_is_removed() -> None:
    def interfaces() -> list[str]:
        return sorted(each["ifname"] for each in json.loads(run("ip", "-j", "link", "show")))

    if reason := why_not():
        pytest.skip(reason)
    before = interfaces()
    with a_network():
        assert interfaces() == before
        assert len(own_namespaces()) == 3
    assert own_namespaces() == []
    assert interfaces() == before


def test_what_a_killed_process_has_left_is_removed_by_the_next() -> None:
    if reason := why_not():
        pytest.skip(reason)
    hold = (
        "from diloco_lab.network.namespaces import network, one_switch\n"
        "import signal\n"
        "with network(one_switch(1)):\n"
        "    print('made', flush=True)\n"
        "    signal.pause()\n"
    )
    with a_network():
        holder = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE)
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"made\n"
        left = list(namespaces.NAMES.glob(f"{namespaces.PREFIX}-{holder.pid}-*"))
        remove_abandoned()
        assert len(left) == 3 and all(path.exists() for path in left)  # its process incarnations
        holder.send_signal(signal.SIGKILL)
        holder.communicate(timeout=10)
        remove_abandoned()
        assert not any(path.exists() for path in left)
        assert len(own_namespaces()) == 3


def test_a_missing_command_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with (
        pytest.raises(NoNetwork, match=r"command 'ip' is missing.*iproute2"),
        network(one_switch(1)),
    ):
        pytest.fail("the network must not exist")
