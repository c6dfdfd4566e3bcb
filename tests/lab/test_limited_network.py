"""Networks of the kernel with limited rates: do lines carry what goes over them, and is all removed?"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco_lab.bench import limited_network as network_of
from diloco_lab.bench.limited_network import (
    LimitedNetwork,
    NoNetwork,
    limited_network,
    remove_abandoned,
    run,
    why_not,
)

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
GIVE = f"""
import socket
connection = socket.create_connection(("198.18.0.1", 1000), 10)
connection.settimeout(30)
connection.sendall(bytes({MOVED}))
connection.shutdown(socket.SHUT_WR)
print(connection.recv(100).decode())
"""


@contextlib.contextmanager
def a_network(broker: float, *workers: float) -> Iterator[LimitedNetwork]:
    """One, or the test is skipped with the reason why there is none."""
    with contextlib.ExitStack() as made:
        try:
            network = made.enter_context(limited_network(broker, workers))
        except NoNetwork as error:
            pytest.skip(str(error))
        yield network


def own_namespaces() -> list[str]:
    """Of this process, as the system lists them."""
    return [path.name for path in network_of.NAMES.glob(f"{network_of.PREFIX}-{os.getpid()}-*")]


def rates(network: LimitedNetwork, member: int) -> list[int]:
    """Bits a second of both ends of a line, as the kernel has them."""
    found = []
    for namespace, interface in (
        (network.namespace(member), network_of.LINE),
        (network.hub, f"port{member}"),
    ):
        said = run("tc", "-j", "-n", namespace, "qdisc", "show", "dev", interface)
        (bucket,) = json.loads(said)
        assert bucket["kind"] == "tbf"
        found.append(8 * bucket["options"]["rate"])  # tc has bytes a second
    return found


def move(network: LimitedNetwork, member: int) -> int:
    """Bytes that came to the broker's place of those that a member sent there."""
    python = (sys.executable, "-c")
    with subprocess.Popen([*network.inside(0), *python, TAKE], stdout=subprocess.PIPE) as taker:
        try:
            assert taker.stdout is not None and taker.stdout.readline() == b"ready\n"
            give = [*network.inside(member), *python, GIVE]
            return int(subprocess.check_output(give, timeout=60))
        finally:
            taker.kill()


def test_lines_have_their_rates_and_count_what_they_carry() -> None:
    with a_network(1e9, 1e8, 5e7) as network:
        assert [rates(network, member) for member in range(3)] == [
            [10**9, 10**9],
            [10**8, 10**8],
            [5 * 10**7, 5 * 10**7],
        ]
        before = [network.carried(member) for member in range(3)]
        assert move(network, 1) == MOVED
        after = [network.carried(member) for member in range(3)]
        up = [now.up - then.up for now, then in zip(after, before, strict=True)]
        down = [now.down - then.down for now, then in zip(after, before, strict=True)]
        # Headers are a twentieth; what was sent again or goes the other way is a little.
        assert MOVED < up[1] < 1.2 * MOVED
        assert MOVED < down[0] < 1.2 * MOVED
        assert max(up[0], down[1]) < 0.2 * MOVED
        assert max(up[2], down[2]) < 0.05 * MOVED


def test_rates_change_while_connections_stay() -> None:
    with a_network(1e9, 1e9) as network:
        move(network, 1)
        carried = network.carried(1)
        network.set_rates(1e8, [5e7])
        assert (rates(network, 0), rates(network, 1)) == ([10**8] * 2, [5 * 10**7] * 2)
        assert network.carried(1).up >= carried.up
        assert move(network, 1) == MOVED


def test_nothing_of_it_is_in_the_machines_own_network_and_all_is_removed() -> None:
    def interfaces() -> list[str]:
        return sorted(each["ifname"] for each in json.loads(run("ip", "-j", "link", "show")))

    if reason := why_not():
        pytest.skip(reason)
    before = interfaces()
    with a_network(1e9, 1e9):
        assert interfaces() == before
        assert len(own_namespaces()) == 3
    assert own_namespaces() == []
    assert interfaces() == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_all_is_removed_whatever_ends_it(error: type[BaseException]) -> None:
    def fail() -> None:
        with a_network(1e9, 1e9):
            assert own_namespaces()
            raise error

    with pytest.raises(error):
        fail()
    assert own_namespaces() == []


def test_what_was_made_is_removed_where_the_next_step_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran = []

    def pretend(command: tuple[str, ...], **_: object) -> subprocess.CompletedProcess[str]:
        ran.append(" ".join(command))
        if "tbf" in command:
            said = "Error: Specified qdisc kind is unknown.\n"
            raise subprocess.CalledProcessError(2, command, stderr=said)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr("diloco_lab.bench.limited_network.why_not", lambda: "")
    monkeypatch.setattr("diloco_lab.bench.limited_network.remove_abandoned", lambda: None)
    monkeypatch.setattr("diloco_lab.bench.limited_network.subprocess.run", pretend)
    with (
        pytest.raises(NoNetwork, match="qdisc kind is unknown"),
        limited_network(1e9, [1e9]),
    ):
        pytest.fail("there is no such network")
    name = f"diloco-net-{os.getpid()}"
    removed = [f"ip netns delete {name}-{which}" for which in ("1", "0", "hub")]
    assert ran[-3:] == removed


def test_what_a_killed_process_has_left_is_removed_by_the_next() -> None:
    if reason := why_not():
        pytest.skip(reason)
    hold = (
        "from diloco_lab.bench.limited_network import limited_network\n"
        "import signal\n"
        "with limited_network(1e9, [1e9]):\n"
        "    print('made', flush=True)\n"
        "    signal.pause()\n"
    )
    with a_network(1e9, 1e9):
        holder = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE)
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"made\n"
        left = list(network_of.NAMES.glob(f"{network_of.PREFIX}-{holder.pid}-*"))
        remove_abandoned()
        assert len(left) == 3 and all(path.exists() for path in left)  # its process lives
        holder.send_signal(signal.SIGKILL)
        holder.communicate(timeout=10)
        remove_abandoned()
        assert not any(path.exists() for path in left)
        assert len(own_namespaces()) == 3


def test_who_may_not_make_one_is_told_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("diloco_lab.bench.limited_network.os.geteuid", lambda: 1000)
    monkeypatch.setattr("diloco_lab.bench.limited_network.shutil.which", lambda _: "/sbin/ip")
    assert why_not() == "making a network namespace takes root"
    with pytest.raises(NoNetwork, match="takes root"), limited_network(1e9, [1e9]):
        pytest.fail("there is no such network")


def test_a_missing_command_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with (
        pytest.raises(NoNetwork, match=r"command 'ip' is missing.*iproute2"),
        limited_network(1, [1]),
    ):
        pytest.fail("there is no such network")


def test_more_workers_than_addresses_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco_lab.bench.limited_network.why_not", lambda: "")
    with pytest.raises(NoNetwork, match="251 workers are too many"), limited_network(1, [1] * 251):
        pytest.fail("there is no such network")
