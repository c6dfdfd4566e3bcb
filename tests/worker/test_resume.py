"""A worker that is killed and resumes from the script's checkpoint, as if it had never stopped.

Runs have a broker and hooks in threads. Each *incarnation* is one process of a script: it saves model,
optimizer and hook with `torch.save`, is killed, and the next one loads the checkpoint. The outcome is
compared bit for bit with the same run without an interruption.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from diloco_broker import Broker
from diloco_worker import DiLoCoClient, DiLoCoWorker
from diloco_worker.session.connection import Phase
from diloco_worker.session.session import Session
from kit.process_kit import wait_for
from kit.reference import Outcome, State, one_thread, state_of
from kit.whole_run import PATIENCE_S, adamw, assert_same, batch, make_config, mlp, sgd

pytest_plugins = ("kit.worker_fixtures",)

SEEDING = threading.Lock()  # torch has one generator for all threads
MakeModel = Callable[[], nn.Module]
MakeOptimizer = Callable[[nn.Module], Optimizer]


def with_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


@dataclass
class Script:
    """A user's program."""

    worker: int
    broker: Broker
    make_model: MakeModel = mlp
    make_optimizer: MakeOptimizer = sgd

    def starts(self, saved: bytes | None = None) -> Incarnation:
        """A process of the script, from the beginning or from a checkpoint; not joined yet."""
        with SEEDING:
            torch.manual_seed(0)
            model = self.make_model()
        optimizer = self.make_optimizer(model)
        name, where = f"w{self.worker}", self.broker.address
        hook = DiLoCoWorker(model, optimizer, where, worker_id=name, timeout=PATIENCE_S / 2)
        done = 0
        if saved is not None:
            with torch.no_grad():  # the checkpoint overwrites them
                for parameter in model.parameters():
                    parameter.fill_(7.0)
            checkpoint = torch.load(io.BytesIO(saved), weights_only=True)
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            hook.load_state_dict(checkpoint["diloco"])
            done = checkpoint["done"]
        return Incarnation(self, model, optimizer, hook, done)


@dataclass
class Incarnation:
    """One process of a script."""

    script: Script
    model: nn.Module
    optimizer: Optimizer
    hook: DiLoCoWorker
    done: int
    history: dict[int, State] = field(default_factory=dict)

    def trains(self, steps: int) -> None:
        for _ in range(steps):
            x = batch(self.script.worker, self.done)
            self.done += 1
            self.optimizer.zero_grad()
            (self.model(x) - x.sum(1, keepdim=True).sin()).pow(2).mean().backward()
            self.hook.report(tokens=self.done % 5 + 1 + self.script.worker)
            self.optimizer.step()
            self.history[self.done] = state_of(self.model)

    def saves(self) -> bytes:
        file = io.BytesIO()
        checkpoint = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "diloco": self.hook.state_dict(),
            "done": self.done,
        }
        torch.save(checkpoint, file)
        return file.getvalue()

    def dies(self) -> None:
        """As by kill -9: no message is sent, the connections are gone."""
        link, members = self.hook._link, self.script.broker._loop.core.state.members
        assert link is not None and isinstance(link.session, Session)
        self.hook._steps.stop()
        link.session.connection.phase = Phase.LEFT
        link.wake()
        assert link.wait_for(lambda: link.has_ended, PATIENCE_S)
        link.close()  # sends nothing
        wait_for(lambda: self.hook.worker_id not in members)


Stop = tuple[int, int]  # after how many steps an incarnation saves, and after how many it dies


def lives(script: Script, stop: Stop | None) -> list[State]:
    """The state after each step of a worker; after a stop, the next incarnation resumes."""
    incarnation, history = script.starts(), dict[int, State]()
    if stop is not None:
        saves_at, dies_at = stop
        incarnation.hook.start()
        incarnation.trains(saves_at)
        saved, history = incarnation.saves(), dict(incarnation.history)
        incarnation.trains(dies_at - saves_at)
        incarnation.dies()
        incarnation = script.starts(saved)
    with incarnation.hook:
        if stop is not None:
            history[saves_at] = state_of(incarnation.model)  # joining changed nothing
        incarnation.trains(STEPS - incarnation.done)
    return list((history | incarnation.history).values())


@one_thread()
def lived(
    stops: list[Stop | None],
    *,
    make_model: MakeModel = mlp,
    make_optimizer: MakeOptimizer = sgd,
    **options: Any,
) -> Outcome:
    """A run with one worker for each of these stops."""
    config = make_config(workers=len(stops), **{"disconnect_grace": 0.05} | options)
    with Broker(config) as broker:
        scripts = [Script(w, broker, make_model, make_optimizer) for w in range(len(stops))]
        with ThreadPoolExecutor(len(stops)) as threads:
            histories = list(threads.map(lives, scripts, stops, timeout=PATIENCE_S))
        with DiLoCoClient(broker.address, timeout=PATIENCE_S) as client:
            return Outcome(histories, dict(client.pull().tensors))


STEPS = 17


PAIR = {"min_workers": 2}  # min_workers makes the round wait for the interrupted worker
# Slots after steps 3 and 6 of each cycle.
FRAGMENTS: dict[str, Any] = {"sync_every": 6, "num_fragments": 2}
LATER = FRAGMENTS | {"fragment_sync_delay": 2}
SOON = FRAGMENTS | {"fragment_sync_delay": 1}
WHOLE = {"sync_every": 5}
IN_ORDER = {"deterministic": True, "weight_by": "tokens"}
ADAMW: dict[str, Any] = {"make_optimizer": adamw}
NORM: dict[str, Any] = {"make_model": with_norm}
QUANTIZED: dict[str, Any] = {"wire_dtype": "int4", "feedback_decay": 0.75}
# Saved before the first boundary, right after it, in the second cycle.
EARLY_OR_LATE = [(3, 4), (5, 6), (8, 9)]


@pytest.mark.parametrize(
    ("workers", "options", "saved_and_died"),
    [
        (1, WHOLE | ADAMW | NORM, EARLY_OR_LATE),
        # Without a fixed order; two addends commute.
        (2, WHOLE | PAIR | ADAMW, [(8, 9)]),
        # A push is in flight at the checkpoint; the first incarnation merges it, and dies later.
        (1, SOON | ADAMW, [(3, 4), (6, 7)]),
        (1, LATER | ADAMW | NORM | {"fragment_update_alpha": 0.25}, [(3, 5), (6, 8)]),
        (1, SOON | ADAMW | {"fragment_merge": "rebase"}, [(3, 4), (6, 7)]),
        # The second push of a fragment has a residual; the ledger decides whether it counted.
        (1, LATER | QUANTIZED, [(9, 11)]),
        # Killed right after the freeze: the broker has some of the push, nothing or all. In order, since
        # a streaming round that has begun ends without what did not arrive.
        (1, LATER | IN_ORDER | QUANTIZED, [(9, 9)]),
        (2, LATER | PAIR | IN_ORDER | {"fragment_update_alpha": 0.5}, [(3, 3), (6, 6)]),
        (1, {"mode": "async", "sync_every": 6}, [(3, 4), (8, 8)]),
        (1, SOON | {"mode": "async"}, [(3, 4), (8, 8)]),
    ],
)
def test_interrupted_run_is_bit_for_bit_the_uninterrupted_one(
    workers: int, options: dict[str, Any], saved_and_died: list[Stop]
) -> None:
    others = [None] * (workers - 1)
    wanted = lived([None, *others], **options)
    for stop in saved_and_died:
        assert_same(lived([stop, *others], **options), wanted, exact=True)


def equal_states(model: nn.Module, tensors: Any) -> bool:
    return all(torch.equal(tensor, tensors[name]) for name, tensor in state_of(model).items())


def test_resumed_worker_seeds_a_broker_that_lost_its_state() -> None:
    """Without momentum at the broker nothing is lost."""
    options: dict[str, Any] = {"sync_every": 5, "outer_momentum": 0.0, "disconnect_grace": 0.05}
    wanted = lived([None], **options)
    with Broker(make_config(**options)) as broker:
        incarnation = Script(0, broker).starts()
        incarnation.hook.start()
        incarnation.trains(7)
        saved = incarnation.saves()
        incarnation.dies()
    with (
        Broker(make_config(**options)) as broker,
        DiLoCoClient(broker.address, timeout=20) as observer,
    ):
        again = Script(0, broker).starts(saved)
        with one_thread(), again.hook:
            assert observer.pull().version.counter == 1
            again.trains(STEPS - 7)
        history = list((incarnation.history | again.history).values())
        assert_same(Outcome([history], dict(observer.pull().tensors)), wanted, exact=True)


@pytest.mark.parametrize("deterministic", [True, False])
def test_push_before_a_crash_counts(deterministic: bool, caplog: pytest.LogCaptureFixture) -> None:
    """No version names it when the next incarnation joins, which finds out before it sends a chunk."""
    config = make_config(
        workers=2, min_workers=2, sync_every=5, deterministic=deterministic, disconnect_grace=0.05
    )
    with (
        Broker(config) as broker,
        DiLoCoClient(broker.address, timeout=20) as observer,
        ThreadPoolExecutor(4) as threads,
    ):
        other = Script(1, broker).starts()
        started = threads.submit(other.hook.start)
        script = Script(0, broker)
        incarnation = script.starts()
        incarnation.hook.start()
        started.result(20)
        incarnation.trains(3)
        saved = incarnation.saves()
        threads.submit(incarnation.trains, 2)  # its boundary waits for the other one
        wait_for(lambda: bool(incarnation.hook._link and incarnation.hook._link.uploaded))
        incarnation.dies()
        again = script.starts(saved)
        again.hook.start()
        assert equal_states(again.model, torch.load(io.BytesIO(saved), weights_only=True)["model"])
        boundary = threads.submit(again.trains, 2)
        wait_for(lambda: bool(again.hook._link and again.hook._link.put_off))
        other.trains(5)
        boundary.result(20)
        assert "already pushed" in caplog.text
        first_version = observer.pull()
        assert first_version.version.counter == 1
        assert [len(first_version.ledger.pushes[w]) for w in ("w0", "w1")] == [1, 1]
        assert equal_states(other.model, first_version.tensors)
        assert equal_states(again.model, first_version.tensors)
        assert again.hook.sync_count == 0
        rest = threads.submit(again.trains, 5)
        threads.submit(other.trains, 10)
        rest.result(20)  # it takes part again
        assert again.hook.sync_count == 1
        assert len(observer.pull().ledger.pushes["w0"]) == 2
        again.hook.close(failed=True)
        other.hook.close(failed=True)
