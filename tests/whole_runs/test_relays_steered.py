"""What an operator asks of the hub reaches workers behind relays, and what they answer comes up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
import torch

from diloco_broker import Broker
from diloco_protocol.clients.operator import Operator
from diloco_worker import DiLoCoWorker
from kit.process_kit import PATIENCE_S
from kit.sites import Sites, until
from kit.whole_run import batch, mlp

PAUSE_S = 0.005  # behind each step, so that a round takes a moment


class Trainer(threading.Thread):
    """A worker that trains until it is told to stop, and saves when it is asked to."""

    def __init__(self, name: str, at: Broker) -> None:
        super().__init__(name=name, daemon=True)
        self.saves = 0
        self.metrics: Any = None  # once it has ended
        self._address, self._may_rest = at.address, threading.Event()

    def run(self) -> None:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with DiLoCoWorker(
            model,
            optimizer,
            server=self._address,
            worker_id=self.name,
            timeout=PATIENCE_S,
            options={"heartbeat_interval": 0.2},
        ) as diloco:
            number = 0
            while not diloco.should_stop:
                loss = model(batch(0, number)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                diloco.report(loss=loss.item(), tokens=4)
                if diloco.should_save:
                    self.saves += 1
                    diloco.saved()
                number += 1
                self._may_rest.wait(PAUSE_S)
        self.metrics = diloco.sync_metrics


class Tree:
    """A hub with relay `north` of `a` and `b`, and `deep` of `c` behind `middle`; `d` is at the hub."""

    def __init__(self, opened: ExitStack, **options: Any) -> None:
        sites = opened.enter_context(Sites(mlp))
        self.hub = sites.hub(3, sync_every=4, **options)
        self.north = sites.relay(self.hub, 2, "north")
        self.middle = sites.relay(self.hub, 1, "middle")
        self.deep = sites.relay(self.middle, 1, "deep")
        self.operator = opened.enter_context(closing(Operator(self.hub.address)))
        at = {"a": self.north, "b": self.north, "c": self.deep, "d": self.hub}
        self.trainers = {name: Trainer(name, where) for name, where in at.items()}
        for each in self.trainers.values():
            each.start()

    def asks(self, action: str, **arguments: Any) -> Any:
        result = self.operator.ask(action, **arguments)
        assert result.ok, result.text
        return result.data

    def shown(self) -> dict[str, dict[str, Any]]:
        """Everybody who is here, by name, with the relays that they are behind."""
        found: dict[str, dict[str, Any]] = {}
        for each in self.asks("status")["workers"]:
            found[each["id"]] = {**each, "level": -1}
            found |= {told["worker_id"]: told for told in each["behind"]}
        return found

    def trains(self) -> None:
        until(lambda: self.shown().keys() >= {*"abcd", "north", "middle", "deep"}, "all are here")
        until(lambda: self.asks("status")["counts"]["averaged"] == 4, "a round of all")

    def ends(self, *names: str) -> None:
        for name in names or self.trainers:
            self.trainers[name].join(PATIENCE_S)
            assert not self.trainers[name].is_alive(), f"{name} trains on"
            assert self.trainers[name].metrics is not None, f"{name} died"

    def orders(self, action: str) -> dict[str, list[str]]:
        """An order is given, and waited for; who has saved, and who has left."""
        number = self.asks(action)["order"]
        until(lambda: not self.asks(action, order=number)["waiting"], f"all answer {action}")
        found = self.asks(action, order=number)
        return {name: list(found[name]) for name in ("saved", "left")}


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.slow
def test_hub_shows_the_whole_tree_and_what_is_set_reaches_all_of_it(opened: ExitStack) -> None:
    tree = Tree(opened)
    tree.trains()
    shown = tree.shown()
    levels = {name: each["level"] for name, each in shown.items()}
    assert levels == {"north": -1, "a": 0, "b": 0, "middle": -1, "deep": 0, "c": 1, "d": -1}
    status = tree.asks("status")
    assert (status["counts"]["alive"], shown["middle"]["workers"]) == (4, 1)
    tree.asks("set", sync_every=3)
    until(lambda: all(tree.shown()[name]["sync_every"] == 3 for name in "abcd"), "all have H = 3")
    assert all(tree.shown()[name]["step"] for name in "abcd")
    tree.asks("shutdown")
    tree.ends()


def test_orders_reach_all_workers_and_their_answers_come_up(opened: ExitStack) -> None:
    tree = Tree(opened)
    tree.trains()
    assert tree.orders("save_all") == {"saved": ["a", "b", "c", "d"], "left": []}
    assert [each.saves for each in tree.trainers.values()] == [1, 1, 1, 1]
    assert tree.orders("stop_all")["left"] == ["a", "b", "c", "d"]
    tree.ends()
    assert tree.asks("status")["counts"]["alive"] == 0


@pytest.mark.slow
def test_run_ends_for_workers_behind_relays_as_for_the_others(opened: ExitStack) -> None:
    tree = Tree(opened, max_rounds=4)
    tree.ends()
    for each in tree.trainers.values():
        assert each.metrics is not None
        assert (each.metrics.pushes, each.metrics.unsynced_steps) == (4, 0)
    for relay in (tree.deep, tree.middle, tree.north):
        thread = relay._thread
        assert thread is not None
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        assert relay.why_it_failed is None
