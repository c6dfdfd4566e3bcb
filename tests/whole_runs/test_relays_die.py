"""Relays and their hub killed for real: what comes of it is what one broker comes to."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from torch import Tensor

from diloco_broker.storage.model_file import write_model
from diloco_worker import DiLoCoClient
from kit.process_kit import PATIENCE_S, Child, Processes, a_free_address, wait_for
from kit.sites import Sites, a_model, asking, assert_close, star

pytest_plugins = ("kit.process_fixtures",)

FP32 = ("--wire-dtype", "fp32")


class Tree:
    """A hub and two relays, processes of their own at addresses that they keep, and clients."""

    def __init__(self, processes: Processes, opened: ExitStack) -> None:
        self._processes, self._opened = processes, opened
        self.sites = Sites()
        self.addresses = {name: a_free_address() for name in ("hub", "north", "south")}
        self.children: dict[str, Child] = {}
        self._model = processes.folder / "model.safetensors"
        write_model(a_model().state_dict(), self._model)

    def begins(self, *names: str) -> None:
        for name in names:
            anywhere = "tcp://127.0.0.1:*"
            where = ("--bind", self.addresses[name], "--feed", anywhere)
            if name == "hub":
                folder, model = str(self._processes.folder / "run"), str(self._model)
                saved = ("--model", model, "--save-dir", folder, "--durable")
                words = ["serve", "--relays", "--workers", "2", "--min-workers", "2", *saved]
            else:
                words = ["relay", "--parent", self.addresses["hub"], "--name", name]
                words += ["--parent-wire-dtype", "fp32", "--workers", "2"]
            options = (*where, "--disconnect-grace", "0.3", *FP32)
            self.children[name] = self._processes.run("-m", "diloco_broker", *words, *options)
            self.children[name].address()

    def has_all_back(self) -> None:
        """Wait until the hub has four workers again, behind the relays that run now.

        The round then lasts until both relays have pushed, since the hub has `--min-workers 2`.
        """
        hub = DiLoCoClient(self.addresses["hub"], timeout=PATIENCE_S)
        pids = {self.children[name].pid for name in ("north", "south")}

        def has_both() -> bool:
            said = hub.status()
            return (
                said["counts"]["alive"] == 4 and {each["pid"] for each in said["workers"]} == pids
            )

        wait_for(has_both)
        hub.leave()

    def dies(self, name: str) -> None:
        self.children[name].kill()

    def worker(self, name: str, at: str) -> None:
        client = DiLoCoClient(self.addresses[at], worker_id=name, timeout=PATIENCE_S)
        self._opened.callback(client.leave)
        client.join(a_model())
        self.sites.clients[name] = client


@pytest.fixture
def tree(processes: Processes) -> Iterator[Tree]:
    with ExitStack() as opened:
        made = Tree(processes, opened)
        made.begins("hub", "north", "south")
        for name, at in {"a": "north", "b": "north", "c": "south", "d": "south"}.items():
            made.worker(name, at)
        yield made


def final(tree: Tree, numbers: range) -> dict[str, Tensor]:
    return tree.sites.rounds(numbers, *"abcd")


def expected() -> dict[str, Tensor]:
    return star(range(4), *"abcd")


@pytest.mark.slow
def test_relay_killed_with_half_of_its_site_in_loses_nothing(tree: Tree) -> None:
    final(tree, range(2))
    tree.sites.push("a", "c", number=2)
    tree.dies("north")
    tree.begins("north")
    tree.has_all_back()
    tree.sites.push("b", "d", number=2)
    tree.sites.pull(*"abcd")
    assert_close(final(tree, range(3, 4)), expected())


@pytest.mark.slow
def test_relay_killed_with_its_push_at_the_hub_counts_it_once(tree: Tree) -> None:
    final(tree, range(2))
    tree.sites.push("a", "b", number=2)
    hub = DiLoCoClient(tree.addresses["hub"], timeout=PATIENCE_S)
    wait_for(lambda: hub.status()["counts"]["participating"] == 2)
    hub.leave()
    tree.dies("north")
    tree.begins("north")
    tree.has_all_back()  # its push may have been there in part only
    tree.sites.push("c", "d", number=2)
    tree.sites.pull(*"abcd")
    assert_close(final(tree, range(3, 4)), expected())


@pytest.mark.slow
def test_hub_killed_with_a_site_in_loses_nothing(tree: Tree) -> None:
    final(tree, range(2))
    tree.sites.push("a", "b", "c", number=2)
    tree.dies("hub")
    tree.begins("hub")
    tree.sites.push("d", number=2)
    tree.sites.pull(*"abcd")
    assert_close(final(tree, range(3, 4)), expected())


@pytest.mark.slow
def test_training_goes_on_when_its_relay_is_started_again(processes: Processes) -> None:
    _, hub = processes.serve("--no-save", "--relays", "--sync-every", "10", *FP32)
    address = a_free_address()
    words = ("-m", "diloco_broker", "relay", "--parent", hub, "--name", "north", "--bind", address)
    relays = [processes.run(*words, "--feed", "tcp://127.0.0.1:*", *FP32)]
    worker = processes.train("a", address, 400, 0.005)
    with DiLoCoClient(hub, timeout=PATIENCE_S) as observer:
        wait_for(lambda: observer.status()["round"]["number"] >= 2)
        relays[0].gets(signal.SIGTERM)
        assert relays[0].ends() == 0
        relays.append(processes.run(*words, "--feed", "tcp://127.0.0.1:*", *FP32))
        assert worker.ends() == 0
        assert observer.status()["round"]["number"] >= 10


# The command line.


@pytest.mark.slow
def test_relay_of_a_broker_that_takes_none_ends_with_a_sentence(processes: Processes) -> None:
    _, hub = processes.serve("--no-save")
    anywhere = ("--bind", "tcp://127.0.0.1:*", "--feed", "tcp://127.0.0.1:*")
    child = processes.run("-m", "diloco_broker", "relay", "--parent", hub, *anywhere)
    with asking(child.address()):
        assert child.ends() == 2
    assert "--relays" in child.output
