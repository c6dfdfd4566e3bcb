"""Relays and their hub are killed and cut off: the result is that of one broker."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from torch import Tensor

from diloco_broker.storage.model_file import write_model
from diloco_worker import DiLoCoClient
from kit.process_kit import PATIENCE_S, Child, Processes, a_free_address
from kit.proxy import Cut, MessageProxy
from kit.sites import Sites, a_model, assert_close, ledger_of, star

pytestmark = pytest.mark.slow

FP32 = ("--wire-dtype", "fp32")
ANYWHERE = "tcp://127.0.0.1:*"
CHUNK = 100  # elements: a push of `a_model` has nine chunks of parameters
ROUNDS = range(4)


class Tree:
    """A hub and two relays, processes with fixed addresses, and two clients of each relay."""

    def __init__(self, processes: Processes, opened: ExitStack) -> None:
        self._processes, self._opened = processes, opened
        self.sites = Sites()
        self.addresses = {name: a_free_address() for name in ("hub", "north", "south")}
        self.children: dict[str, Child] = {}
        self._model = processes.folder / "model.safetensors"
        write_model(a_model().state_dict(), self._model)

    def begins(self, *names: str) -> None:
        for name in names:
            where = ("--bind", self.addresses[name], "--feed", ANYWHERE)
            if name == "hub":
                folder, model = str(self._processes.folder / "run"), str(self._model)
                words = ["serve", "--relays", "--workers", "4", "--min-workers", "4", *FP32]
                words += ["--disconnect-grace", "30"]  # in which a relay starts again
                words += ["--model", model, "--save-dir", folder, "--durable"]
            else:
                words = ["relay", "--parent", self.addresses["hub"], "--name", name]
            self.children[name] = self._processes.run("-m", "diloco_broker", *words, *where)
            self.children[name].address()

    def dies(self, *names: str) -> None:
        for name in names:
            self.children[name].kill()

    def joins(self, name: str, *at: str) -> None:
        """A worker that knows these addresses and tries one after the other."""
        addresses = ",".join(self.addresses[each] for each in at)
        client = DiLoCoClient(addresses, worker_id=name, timeout=PATIENCE_S)
        self._opened.callback(client.leave)
        client.join(a_model())
        self.sites.clients[name] = client

    def pushes(self, *names: str, number: int) -> list[threading.Thread]:
        """Push in threads, since a push may wait for a process that is dead."""
        threads = [
            threading.Thread(target=self.sites.push, args=(name,), kwargs={"number": number})
            for name in names
        ]
        for each in threads:
            each.start()
        return threads

    def ends_as_one_broker(self) -> None:
        """After rounds 2 and 3 the parameters are those of one broker: each push counts once."""
        self.sites.pull(*"abcd")
        found: dict[str, Tensor] = self.sites.rounds(range(3, 4), *"abcd")
        assert_close(found, star(ROUNDS, *"abcd"))


@pytest.fixture
def tree(processes: Processes) -> Iterator[Tree]:
    with ExitStack() as opened:
        made = Tree(processes, opened)
        made.begins("hub", "north", "south")
        for name, at in {"a": "north", "b": "north", "c": "south", "d": "south"}.items():
            made.joins(name, at)
        yield made


@pytest.mark.parametrize(
    ("pushed", "killed"),
    [
        pytest.param("ac", ["north"], id="relay", marks=pytest.mark.nightly),
        pytest.param("abc", ["hub"], id="hub"),
        pytest.param("abc", ["north", "south", "hub"], id="all"),
    ],
)
def test_kill_between_pushes_loses_nothing(tree: Tree, pushed: str, killed: list[str]) -> None:
    tree.sites.rounds(range(2), *"abcd")
    tree.sites.push(*pushed, number=2)
    tree.dies(*killed)
    tree.begins(*sorted(killed))  # the hub first
    tree.sites.push(*sorted({*"abcd"} - {*pushed}), number=2)
    tree.ends_as_one_broker()


def test_relay_killed_in_the_middle_of_pushes_counts_each_once(tree: Tree) -> None:
    tree.sites.rounds(range(2), *"abcd")
    tree.sites.push("a", "b", "c", number=2)
    threads = tree.pushes("d", number=2)  # with whose last chunks sums are asked for
    tree.dies("north")
    tree.begins("north")
    for each in threads:
        each.join(PATIENCE_S)
    tree.ends_as_one_broker()


@pytest.mark.parametrize("to", ["south", "hub"])
def test_workers_of_a_relay_that_is_gone_go_elsewhere(processes: Processes, to: str) -> None:
    with ExitStack() as opened:
        tree = Tree(processes, opened)
        tree.begins("hub", "north", "south")
        for name in "ab":
            tree.joins(name, "north", to)
        for name in "cd":
            tree.joins(name, "south")
        tree.sites.rounds(range(2), *"abcd")
        tree.sites.push("a", "b", "c", number=2)
        tree.dies("north")
        tree.sites.push("d", number=2)
        tree.ends_as_one_broker()
        at = {each["id"]: each["via"] for each in tree.sites.clients["c"].status()["workers"]}
        assert at["a"] == at["b"] == ("south" if to == "south" else "")


@pytest.mark.parametrize(
    "cut",
    [
        Cut(True, "chunk", skip=3),
        Cut(True, "combined", skip=2),
        Cut(True, "combined", passed=40),
        Cut(False, "collect", skip=2),
        Cut(False, "chunk", skip=4, passed=50),
        Cut(False, "ack", skip=1),
        Cut(False, "grant", skip=1),
    ],
    ids=lambda cut: f"{cut.kind} {'up' if cut.up else 'down'}",
)
def test_line_that_breaks_anywhere_in_a_round_changes_nothing(cut: Cut) -> None:
    with Sites() as sites:
        hub = sites.hub(3, chunk_elements=CHUNK, disconnect_grace=30.0)
        line = MessageProxy(hub.address)
        with line:
            north = sites.relay(line.address, "north")
            sites.workers(north, "a", "b")
            sites.workers(hub, "c")
            sites.rounds(range(1), *"abc")
            line.cuts = [cut]
            found = sites.rounds(range(1, 4), *"abc")
            north.stop()
        counted = {name: len(pushes) for name, pushes in ledger_of(hub).items()}
        assert counted == dict.fromkeys("abc", 4)
    assert_close(found, star(ROUNDS, *"abc", chunk_elements=CHUNK))
