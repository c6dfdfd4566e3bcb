"""A worker that is stopped and goes on from the script's own checkpoint, as if it had never stopped.

The whole runs are a broker and hooks in threads. Each *life* is one process of a script: it saves model,
optimizer and hook with `torch.save`, dies without a word, and the next life loads what it saved. The
outcome is compared bit for bit with the same run that nobody interrupted. Who decides what, message by
message, is seen at a scripted broker.
"""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from desk import Desk, gradient
from desk import version as version_of
from reference import State, one_thread, state_of
from torch import Tensor, nn
from torch.optim import Optimizer
from whole_run import PATIENCE_S, adamw, batch, make_config, mlp, sgd
from worker_fakes import RUN, Beside, Descent, ScriptedBroker, run_config, version
from worker_stage import Make, at, filled, first, until, values

from diloco_broker import Broker
from diloco_protocol import Bitmap, Counted, Ledger, UsageError, VersionId
from diloco_protocol.messages import Chunk, Join, Notice, Pull, Purpose, Push, Released
from diloco_protocol.version import ABSENT_REMEMBERED
from diloco_worker import DiLoCoClient, DiLoCoWorker
from diloco_worker.events import Doubt, Offer, Send
from diloco_worker.exchange import Ground, Work
from diloco_worker.news import Arrival
from diloco_worker.resume import compared
from diloco_worker.session import Phase

pytest_plugins = ("worker_fixtures",)

SEEDING = threading.Lock()  # torch has one generator for all threads
MakeModel = Callable[[], nn.Module]
MakeOptimizer = Callable[[nn.Module], Optimizer]


# Lives of a script.


def with_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


@dataclass
class Script:
    """What a user's program is: how it makes its model, and how its worker is configured."""

    worker: int
    broker: Broker
    make_model: MakeModel = mlp
    make_optimizer: MakeOptimizer = sgd
    keywords: dict[str, Any] = field(default_factory=dict)

    def starts(self, saved: bytes | None = None) -> Life:
        """A process of it, from the beginning or from a checkpoint; it has not joined yet."""
        with SEEDING:
            torch.manual_seed(0)
            model = self.make_model()
        optimizer = self.make_optimizer(model)
        keywords = {"worker_id": f"w{self.worker}", "timeout": PATIENCE_S / 2, **self.keywords}
        hook = DiLoCoWorker(model, optimizer, server=self.broker.address, **keywords)
        done = 0
        if saved is not None:
            with torch.no_grad():  # whatever the model was made with is no matter
                for parameter in model.parameters():
                    parameter.fill_(7.0)
            checkpoint = torch.load(io.BytesIO(saved), weights_only=True)
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            hook.load_state_dict(checkpoint["diloco"])
            done = checkpoint["done"]
        return Life(self, model, optimizer, hook, done)


@dataclass
class Life:
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
        """As by kill -9: nothing is said to anybody, the connections are simply gone."""
        link, members = self.hook._link, self.script.broker._core.state.members
        assert link is not None
        self.hook._hook.remove()
        link._session.phase = Phase.LEFT
        link.wake()
        assert link.wait_for(lambda: link.has_ended, PATIENCE_S)
        link.close()  # nobody is there any more who could say anything
        until(lambda: self.hook.worker_id not in members)


Plot = Callable[[Script], dict[int, State]]  # what becomes of a worker; its history


def plain(steps: int) -> Plot:
    """Nothing happens."""

    def plot(script: Script) -> dict[int, State]:
        life = script.starts()
        with life.hook:
            life.trains(steps)
        return life.history

    return plot


def interrupted(steps: int, *, saves_at: int, dies_at: int) -> Plot:
    """A life saves, trains on, and dies; the next one goes on from what it saved."""

    def plot(script: Script) -> dict[int, State]:
        life = script.starts()
        life.hook.start()
        life.trains(saves_at)
        saved = life.saves()
        life.trains(dies_at - saves_at)
        life.dies()
        history = {step: state for step, state in life.history.items() if step <= saves_at}
        again = script.starts(saved)
        with again.hook:
            history[saves_at] = state_of(again.model)  # joining has changed nothing
            again.trains(steps - saves_at)
        return history | again.history

    return plot


@one_thread()
def lived(
    plots: list[Plot],
    *,
    make_model: MakeModel = mlp,
    make_optimizer: MakeOptimizer = sgd,
    **options: Any,
) -> tuple[list[dict[int, State]], State]:
    """Each worker's state after each step, and the global parameters at the end."""
    config = make_config(workers=len(plots), **{"disconnect_grace": 0.05} | options)
    with Broker(config) as broker:
        histories: dict[int, dict[int, State]] = {}
        failures: list[BaseException] = []

        def live(worker: int) -> None:
            try:
                script = Script(worker, broker, make_model, make_optimizer)
                histories[worker] = plots[worker](script)
            except BaseException as error:
                failures.append(error)
                raise

        threads = [threading.Thread(target=live, args=(w,), daemon=True) for w in range(len(plots))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "a worker did not come to an end"
        assert not failures
        with DiLoCoClient(broker.address, timeout=PATIENCE_S) as client:
            return [histories[w] for w in range(len(plots))], dict(client.pull().tensors)


def assert_same_bits(
    got: tuple[list[dict[int, State]], State], wanted: tuple[list[dict[int, State]], State]
) -> None:
    for worker, (ours, theirs) in enumerate(zip(got[0], wanted[0], strict=True)):
        assert sorted(ours) == sorted(theirs)
        for step, state in theirs.items():
            for name, tensor in state.items():
                where = f"{name} of worker {worker} after step {step}"
                assert torch.equal(ours[step][name], tensor), where
    assert all(torch.equal(got[1][name], tensor) for name, tensor in wanted[1].items())


STEPS = 17


@pytest.mark.parametrize(("make_model", "make_optimizer"), [(mlp, sgd), (with_norm, adamw)])
def test_interrupted_run_of_one_worker_is_bit_for_bit_the_uninterrupted_one(
    make_model: MakeModel, make_optimizer: MakeOptimizer
) -> None:
    options: dict[str, Any] = {
        "make_model": make_model,
        "make_optimizer": make_optimizer,
        "sync_every": 5,
    }
    wanted = lived([plain(STEPS)], **options)
    for saves_at in (3, 5, 8):  # before the first boundary, right behind it, in the second cycle
        plot = interrupted(STEPS, saves_at=saves_at, dies_at=saves_at + 1)
        assert_same_bits(lived([plot], **options), wanted)


@pytest.mark.parametrize("deterministic", [True, False])
def test_run_waits_for_a_worker_that_was_interrupted_and_is_the_uninterrupted_one(
    deterministic: bool,
) -> None:
    """The floor makes the round wait. Without a fixed order, two addends commute all the same."""
    options: dict[str, Any] = {
        "min_workers": 2,
        "sync_every": 5,
        "deterministic": deterministic,
        "make_optimizer": adamw,
        "weight_by": "tokens" if deterministic else "equal",
    }
    wanted = lived([plain(STEPS), plain(STEPS)], **options)
    plots = [plain(STEPS), interrupted(STEPS, saves_at=8, dies_at=9)]
    assert_same_bits(lived(plots, **options), wanted)


@pytest.mark.parametrize(("merge", "delay"), [(0.0, 1), (0.25, 2), (None, 1)])
def test_flight_in_the_air_at_the_checkpoint_lands_as_if_nothing_had_happened(
    merge: float | None, delay: int
) -> None:
    """Slots are after steps 3 and 6 of each cycle. The first life sees it land, and dies later."""
    options: dict[str, Any] = {
        "sync_every": 6,
        "num_fragments": 2,
        "fragment_sync_delay": delay,
        "make_optimizer": adamw,
        "fragment_merge": "rebase" if merge is None else "alpha",
        "fragment_update_alpha": merge or 0.0,
    }
    wanted = lived([plain(STEPS)], **options)
    for saves_at in (3, 6):
        plot = interrupted(STEPS, saves_at=saves_at, dies_at=saves_at + delay)
        assert_same_bits(lived([plot], **options), wanted)


def test_flight_that_died_with_its_life_is_offered_again() -> None:
    """Killed right behind the freeze: some of it is at the broker, or nothing, or all."""
    options: dict[str, Any] = {
        "min_workers": 2,
        "deterministic": True,
        "sync_every": 6,
        "num_fragments": 2,
        "fragment_sync_delay": 2,
        "fragment_update_alpha": 0.5,
        "weight_by": "tokens",
    }
    wanted = lived([plain(STEPS), plain(STEPS)], **options)
    for saves_at in (3, 6):
        plots = [interrupted(STEPS, saves_at=saves_at, dies_at=saves_at), plain(STEPS)]
        assert_same_bits(lived(plots, **options), wanted)


@pytest.mark.parametrize(("pieces", "delay"), [(1, 0), (2, 1)])
def test_asynchronous_worker_goes_on_bit_for_bit(pieces: int, delay: int) -> None:
    options: dict[str, Any] = {
        "mode": "async",
        "sync_every": 6,
        "num_fragments": pieces,
        "fragment_sync_delay": delay,
    }
    wanted = lived([plain(STEPS)], **options)
    for saves_at, dies_at in ((3, 4), (8, 8)):
        plot = interrupted(STEPS, saves_at=saves_at, dies_at=dies_at)
        assert_same_bits(lived([plot], **options), wanted)


def test_polite_end_and_another_start_are_no_interruption_either() -> None:
    """The state is taken after the `with`, where a reply has come that is not in the model."""
    options: dict[str, Any] = {"sync_every": 6, "num_fragments": 2, "fragment_sync_delay": 2}

    def plot(script: Script) -> dict[int, State]:
        life = script.starts()
        with life.hook:
            life.trains(10)  # one step behind a slot: its reply is due after the next
        again = script.starts(life.saves())
        with again.hook:
            again.trains(STEPS - 10)
        return life.history | again.history

    assert_same_bits(lived([plot], **options), lived([plain(STEPS)], **options))


class Loss(nn.Module):
    """A model as the guide has one: its output has the loss in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=self.layer(x).pow(2).mean())


def test_example_of_the_guide_goes_on_from_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide = (Path(__file__).parent.parent / "worker" / "README.md").read_text()
    (example,) = [part for part in guide.split("```python\n") if "last.pt" in part]
    monkeypatch.chdir(tmp_path)
    begun_at = []

    def loader_from(done: int) -> Iterator[Tensor]:
        begun_at.append(done)
        return (batch(0, number) for number in range(done, done + 7))

    with Broker(make_config(sync_every=4)) as broker:
        code = example.split("```")[0].replace("tcp://10.0.0.1:8512", broker.address)
        assert "1000" in code
        for _ in range(2):
            names: dict[str, Any] = {"make_model": Loss, "loader_from": loader_from}
            exec(code.replace("1000", "5"), names)
    assert begun_at == [0, 5]
    # It had gone on to step 7 without another push, so what it goes on from is 5.
    assert (names["diloco"].local_step, names["diloco"].sync_count) == (12, 3)


# Nothing twice, nothing lost.


def in_thread(beside: list[threading.Thread], what: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=what, daemon=True)
    thread.start()
    beside.append(thread)
    return thread


def test_steps_that_an_earlier_life_has_sent_are_not_sent_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """eta = 1, mu = 0: the global parameters are what the worker has reached at its last boundary."""
    config = make_config(sync_every=5, outer_lr=1.0, outer_momentum=0.0, disconnect_grace=0.05)
    with Broker(config) as broker, DiLoCoClient(broker.address, timeout=20) as observer:
        script = Script(0, broker)
        life = script.starts()
        life.hook.start()
        life.trains(3)
        saved = life.saves()
        life.trains(4)  # past the boundary: five steps are counted, three of which were saved
        life.dies()
        counted = observer.pull()
        again = script.starts(saved)
        with again.hook:
            assert "3 steps of fragment 0 are left out" in caplog.text
            assert "earlier life" in caplog.text
            assert equal_states(again.model, counted.tensors), "they are in there already"
            apart = script.starts(saved)  # the same, alone: what its steps make of these parameters
            apart.model.load_state_dict(counted.tensors)
            for each in (again, apart):
                each.trains(2)  # to the end of the cycle that was saved
            after = observer.pull()
            for name, tensor in state_of(apart.model).items():
                torch.testing.assert_close(after.tensors[name], tensor, rtol=1e-4, atol=1e-6)
        assert (counted.version.counter, after.version.counter) == (1, 2)
        assert len(after.ledger.pushes["w0"]) == 2
        assert again.hook.sync_count == 1


def equal_states(model: nn.Module, tensors: Any) -> bool:
    return all(torch.equal(tensor, tensors[name]) for name, tensor in state_of(model).items())


@pytest.mark.parametrize("deterministic", [True, False])
def test_push_of_an_earlier_life_that_still_waits_for_its_round_counts_once(
    deterministic: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """No version names it when the next life joins: that life finds out before it sends a chunk."""
    config = make_config(
        workers=2, min_workers=2, sync_every=5, deterministic=deterministic, disconnect_grace=0.05
    )
    threads: list[threading.Thread] = []
    with Broker(config) as broker, DiLoCoClient(broker.address, timeout=20) as observer:
        other = Script(1, broker).starts()
        started = in_thread(threads, other.hook.start)
        script = Script(0, broker)
        life = script.starts()
        life.hook.start()
        started.join(20)
        life.trains(3)
        saved = life.saves()
        in_thread(threads, lambda: life.trains(2))  # its boundary waits for the other one
        until(lambda: bool(life.hook._link and life.hook._link.uploaded))
        life.dies()
        again = script.starts(saved)
        again.hook.start()
        assert equal_states(again.model, torch.load(io.BytesIO(saved), weights_only=True)["model"])
        boundary = in_thread(threads, lambda: again.trains(2))
        until(lambda: bool(again.hook._link and again.hook._link.put_off))
        other.trains(5)
        boundary.join(20)
        assert not boundary.is_alive()
        assert "earlier life" in caplog.text
        first_version = observer.pull()
        assert first_version.version.counter == 1
        assert [len(first_version.ledger.pushes[w]) for w in ("w0", "w1")] == [1, 1]
        assert equal_states(other.model, first_version.tensors)
        assert equal_states(again.model, first_version.tensors)
        assert again.hook.sync_count == 0
        rest = [
            in_thread(threads, lambda: again.trains(5)),
            in_thread(threads, lambda: other.trains(10)),
        ]
        rest[0].join(20)
        assert not rest[0].is_alive(), "it takes part again"
        assert again.hook.sync_count == 1
        last = observer.pull()
        assert len(last.ledger.pushes["w0"]) == 2
        again.hook.close(failed=True)
        other.hook.close(failed=True)
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()


def test_worker_of_another_run_begins_with_the_parameters_of_this_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = make_config(sync_every=5)
    with Broker(config) as broker:
        life = Script(0, broker).starts()
        with life.hook:
            life.trains(7)
            saved = life.saves()
    with Broker(config) as broker, DiLoCoClient(broker.address, timeout=20) as observer:
        with Script(1, broker).starts().hook:
            assert observer.pull().version.counter == 0
        again = Script(0, broker).starts(saved)
        with again.hook:
            assert equal_states(again.model, observer.pull().tensors)
            assert caplog.text.count("cannot be used here: this broker serves another run") == 1
            assert (again.hook.local_step, again.hook.sync_count) == (7, 1)
            again.trains(3)  # the place in the cycle is kept
            assert observer.pull().version.counter == 1


def test_worker_gives_what_it_goes_on_from_to_a_broker_that_has_lost_its_memory() -> None:
    """Without momentum at the broker nothing is lost at all."""
    options: dict[str, Any] = {
        "sync_every": 5,
        "outer_momentum": 0.0,
        "disconnect_grace": 0.05,
    }
    wanted = lived([plain(STEPS)], **options)
    config = make_config(**options)
    with Broker(config) as broker:
        life = Script(0, broker).starts()
        life.hook.start()
        life.trains(7)
        saved = life.saves()
        life.dies()
    with Broker(config) as broker, DiLoCoClient(broker.address, timeout=20) as observer:
        again = Script(0, broker).starts(saved)
        with one_thread(), again.hook:
            assert observer.pull().version.counter == 1
            again.trains(STEPS - 7)
        history = {step: s for step, s in life.history.items() if step <= 7} | again.history
        assert_same_bits(([history], dict(observer.pull().tensors)), wanted)


# Message by message. The model has the same value everywhere; each step lowers it by 1, from 100.

H = 4
STRANGER = 0xABC  # a push that no checkpoint knows

Saved = tuple[dict[str, Any], State]


def saved_by(worker: DiLoCoWorker, descent: Descent) -> Saved:
    """What the script's checkpoint has. Then this life is over."""
    state = copy.deepcopy(worker.state_dict()), state_of(descent.model)
    worker.close(failed=True)
    return state


@dataclass
class NextLife:
    """Another life of the worker, about to go on from what was saved."""

    worker: DiLoCoWorker
    descent: Descent
    started: Callable[[], Any]
    join: Join


Resume = Callable[..., NextLife]


@pytest.fixture
def resume(broker: ScriptedBroker, beside: Beside, make: Make) -> Resume:
    """It has joined; the broker's versions are those given."""

    def resumed(
        saved: Saved, *theirs: VersionId | None, first_round: int = 0, **keywords: Any
    ) -> NextLife:
        state, tensors = saved
        worker, descent = make(**keywords)
        descent.model.load_state_dict(tensors)
        worker.load_state_dict(state)
        started = beside(worker.start)
        join = broker.welcomes(*theirs, first_round=first_round)
        return NextLife(worker, descent, started, join)

    return resumed


def says_current(broker: ScriptedBroker, what: VersionId, fragment: int = 0) -> Pull:
    """Answer the next pull: this version, which the worker has, is the newest."""
    pull = broker.hears_pull(fragment)
    broker.says(Released(fragment, what, Ledger()))
    return pull


def test_worker_joins_with_what_it_holds_and_trains_on_in_the_middle_of_the_cycle(
    broker: ScriptedBroker, beside: Beside, begin: Make, resume: Resume
) -> None:
    worker, descent = begin()
    descent.steps(2)
    life = resume(saved_by(worker, descent), version(0))
    assert (life.join.run, life.join.session) == (RUN, None)
    assert life.join.versions[0] == version(0)
    pull = says_current(broker, version(0))
    assert (pull.held_version, pull.after) == (version(0), -1)
    assert pull.held == Bitmap.full(3).to_bytes(), "nothing needs to be sent"
    life.started()
    assert at(life.descent) == 98
    steps = beside(life.descent.steps, 2)
    says_current(broker, version(0))
    push, delta = broker.takes_push()
    assert (push.steps, push.base, first(delta)) == (H, version(0), H)
    broker.serves(filled(descent, 50), version(1), push.push_id)
    steps()
    assert at(life.descent) == 50
    assert (life.worker.local_step, life.worker.sync_count) == (H, 1)
    steps = beside(life.descent.steps, H)
    push, _ = broker.takes_push()  # no longer in doubt: offered without asking
    assert push.base == version(1)
    broker.serves(filled(descent, 0), version(2), push.push_id)
    steps()


class PartlyFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Linear(3, 3)
        self.fixed = nn.Linear(2, 2).requires_grad_(False)


def test_frozen_parameters_are_those_that_the_script_has_loaded(
    broker: ScriptedBroker, begin: Make, resume: Resume
) -> None:
    worker, descent = begin(PartlyFrozen())
    descent.steps(1)
    life = resume(saved_by(worker, descent), version(0), model=PartlyFrozen())
    assert life.join.versions == (version(0), version(0))
    says_current(broker, version(0))
    life.started()
    broker.hears_nothing_of(Pull, 0.1)
    broker.says(Notice("donate", fragment=1))
    donation, given = broker.takes_push()
    assert donation.base == version(0)
    assert not any(bool(vector.any()) for vector in given.vectors.values())


@pytest.mark.parametrize(
    ("config", "keywords", "after_landing"),
    [
        ({"fragment_sync_delay": 2}, {}, 1000),  # the steps in flight are overwritten
        ({"fragment_sync_delay": 2, "fragment_merge": "rebase"}, {}, 1000 - 2),
        ({"fragment_sync_delay": 2, "fragment_update_alpha": 0.5}, {}, 0.5 * 94 + 500),
        ({}, {"timeout": 0.2}, 1000 - 2),  # it had been let go at the boundary
    ],
)
def test_delta_in_flight_is_offered_again_as_it_was_and_merged_as_it_would_have_been(
    broker: ScriptedBroker,
    beside: Beside,
    begin: Make,
    resume: Resume,
    config: dict[str, Any],
    keywords: dict[str, Any],
    after_landing: float,
) -> None:
    broker.config = run_config(**config)
    worker, descent = begin(**keywords)
    worker.report(tokens=7, samples=3, loss=2.5)
    descent.steps(H + 1)
    earlier = broker.hears(Push)
    life = resume(saved_by(worker, descent), version(0))
    says_current(broker, version(0))
    life.started()
    says_current(broker, version(0))
    push, delta = broker.takes_push()
    assert replace(push, session=b"") == replace(earlier, session=b"")
    assert first(delta) == H
    assert at(life.descent) == 100 - H - 1
    broker.serves(filled(descent, 1000), version(1), push.push_id)
    until(lambda: bool(life.worker._link and life.worker._link.has_news))
    life.descent.steps(1)
    assert at(life.descent) == after_landing
    assert life.worker.sync_count == 1


def test_delta_that_was_let_go_holds_nobody_up_and_no_second_one_grows_over_it(
    broker: ScriptedBroker, beside: Beside, begin: Make, resume: Resume
) -> None:
    worker, descent = begin(timeout=0.2)
    descent.steps(H + 1)  # nobody answers: training goes on from the boundary
    broker.hears(Push)
    life = resume(saved_by(worker, descent), version(0))
    says_current(broker, version(0))
    life.started()
    says_current(broker, version(0))
    push = broker.hears(Push)
    beside(life.descent.steps, H - 2)()
    steps = beside(life.descent.steps, 1)  # the boundary, whose turn is taken: now it waits
    broker.hears_nothing_of(Push, 0.2)
    assert beside.is_busy
    broker.serves(filled(descent, 1000), version(1), push.push_id)
    second, delta = broker.takes_push()
    assert (second.base, second.steps, first(delta)) == (version(1), H, H)
    broker.serves(filled(descent, 50), version(2), second.push_id)
    steps()


def test_order_of_fragments_is_the_workers_own_in_asynchronous_mode(
    broker: ScriptedBroker, beside: Beside, begin: Make, resume: Resume
) -> None:
    broker.config = run_config(mode="async", num_fragments=2)
    worker, descent = begin()
    steps = beside(descent.steps, H // 2)
    push, _ = broker.takes_push()
    assert push.fragment == 0
    broker.serves(filled(descent, 50, broker, 0), version(1), push.push_id)
    steps()
    # Others have pushed meanwhile: the broker is at round 6, which says nothing to this worker.
    life = resume(saved_by(worker, descent), version(1), version(0), first_round=6)
    for fragment, current in ((0, version(1)), (1, version(0))):
        says_current(broker, current, fragment)
    life.started()
    steps = beside(life.descent.steps, H // 2)
    says_current(broker, version(0), fragment=1)
    push, _ = broker.takes_push()
    assert push.fragment == 1
    broker.serves(filled(descent, 50, broker, 1), version(1), push.push_id)
    steps()


def test_delta_that_has_landed_meanwhile_is_merged_in_its_time_and_not_sent(
    broker: ScriptedBroker, begin: Make, resume: Resume
) -> None:
    broker.config = run_config(fragment_sync_delay=2)
    worker, descent = begin()
    descent.steps(H + 1)
    push = broker.hears(Push)
    life = resume(saved_by(worker, descent), version(1))
    broker.hears_pull()
    broker.serves(filled(descent, 1000), version(1), push.push_id)
    life.started()
    assert at(life.descent) == 100 - H - 1, "its apply point has not come"
    life.descent.steps(1)
    assert at(life.descent) == 1000
    assert life.worker.sync_count == 1
    broker.hears_nothing_of(Push, 0.1)


def test_steps_that_nobody_has_counted_keep_their_base_though_the_broker_is_newer(
    broker: ScriptedBroker, beside: Beside, begin: Make, resume: Resume
) -> None:
    worker, descent = begin()
    descent.steps(2)
    life = resume(saved_by(worker, descent), version(3))
    broker.hears_pull()
    broker.serves(filled(descent, 500), version(3), 77, worker="another")
    life.started()
    assert at(life.descent) == 98
    steps = beside(life.descent.steps, 2)
    says_current(broker, version(3))
    push, delta = broker.takes_push()
    assert (push.base, first(delta)) == (version(0), H)
    broker.serves(filled(descent, 400), version(4), push.push_id)
    steps()
    assert at(life.descent) == 400
    assert life.worker.sync_metrics.staleness == 3


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("flight_counted", [False, True])
def test_steps_that_a_later_life_has_sent_give_way_to_the_global_parameters(
    broker: ScriptedBroker,
    beside: Beside,
    begin: Make,
    resume: Resume,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    in_flight: bool,
    flight_counted: bool,
) -> None:
    broker.config = run_config(fragment_sync_delay=3)
    worker, descent = begin()
    descent.steps(H + 1 if in_flight else 2)
    ids = [broker.hears(Push).push_id] if in_flight else []
    audit = tmp_path / "audit"
    life = resume(saved_by(worker, descent), version(3), audit=audit)
    broker.hears_pull()
    counted = [*(ids if flight_counted else []), STRANGER]
    broker.serves(filled(descent, 500), version(3), *counted)
    life.started()
    assert at(life.descent) == 500
    lost = 2 if not in_flight else 1 if flight_counted else H + 1
    assert f"{lost} steps of fragment 0 are left out" in caplog.text
    assert life.worker.sync_count == (in_flight and flight_counted)
    written = audit.read_text()
    assert ('"counted"' in written) == (in_flight and flight_counted)
    assert ('"superseded"' in written) == (in_flight and not flight_counted)
    left = H - 1 if in_flight else 2
    life.descent.steps(left)
    push, delta = broker.takes_push()  # nothing is in doubt: offered without asking
    assert (push.base, push.steps, first(delta)) == (version(3), left, left)


def test_stranger_that_is_counted_later_ends_the_push_before_a_chunk_is_sent(
    broker: ScriptedBroker,
    beside: Beside,
    begin: Make,
    resume: Resume,
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker, descent = begin()
    descent.steps(2)
    life = resume(saved_by(worker, descent), version(0))
    says_current(broker, version(0))
    life.started()
    steps = beside(life.descent.steps, 2)
    says_current(broker, version(0))
    push = broker.hears(Push)
    broker.puts_off(push, 1)
    broker.serves(filled(descent, 700), version(1), STRANGER)
    broker.grants(push, round_=1)
    steps()
    assert at(life.descent) == 700
    assert "4 steps of fragment 0 are left out" in caplog.text
    broker.hears_nothing_of(Chunk, 0.1)
    steps = beside(life.descent.steps, H)
    push, delta = broker.takes_push()
    assert (push.base, first(delta)) == (version(1), H)
    broker.serves(filled(descent, 0), version(2), push.push_id)
    steps()


def test_stranger_that_was_counted_before_the_boundary_keeps_the_push_from_being_offered(
    broker: ScriptedBroker, beside: Beside, begin: Make, resume: Resume
) -> None:
    worker, descent = begin()
    descent.steps(2)
    life = resume(saved_by(worker, descent), version(0))
    says_current(broker, version(0))
    life.started()
    steps = beside(life.descent.steps, 2)
    broker.hears_pull()
    broker.serves(filled(descent, 700), version(1), STRANGER)
    steps()
    assert at(life.descent) == 700
    broker.hears_nothing_of(Push, 0.1)


def test_doubt_outlives_a_broken_connection(
    broker: ScriptedBroker, beside: Beside, begin: Make, resume: Resume
) -> None:
    worker, descent = begin()
    descent.steps(2)
    life = resume(saved_by(worker, descent), version(0))
    says_current(broker, version(0))
    life.started()
    steps = beside(life.descent.steps, 2)
    says_current(broker, version(0))
    broker.hears(Push)
    broker.restart()
    broker.welcomes(version(1))
    broker.hears_pull()
    broker.serves(filled(descent, 700), version(1), STRANGER)
    steps()
    assert at(life.descent) == 700
    broker.hears_nothing_of(Push, 0.1)


def test_connection_that_breaks_before_the_versions_are_compared_is_no_matter(
    broker: ScriptedBroker, begin: Make, resume: Resume
) -> None:
    worker, descent = begin()
    descent.steps(2)
    life = resume(saved_by(worker, descent), version(0))
    broker.hears_pull()
    broker.restart()
    join = broker.welcomes(version(0))
    assert join.versions[0] == version(0)
    says_current(broker, version(0))
    life.started()
    assert at(life.descent) == 98


def test_broker_that_is_behind_is_asked_for_nothing_and_given_what_is_held(
    broker: ScriptedBroker, beside: Beside, begin: Make, resume: Resume
) -> None:
    worker, descent = begin()
    steps = beside(descent.steps, H)
    push, _ = broker.takes_push()
    broker.serves(filled(descent, 500), version(1), push.push_id)
    steps()
    descent.steps(1)
    life = resume(saved_by(worker, descent), version(0))
    life.started()
    assert at(life.descent) == 499
    broker.says(Notice("donate", fragment=0))
    donation, given = broker.takes_push()
    assert (donation.purpose, donation.base, first(given)) == (Purpose.DONATION, version(1), 500)
    assert donation.ledger is not None
    assert donation.ledger.names_whole("me", push.push_id)
    steps = beside(life.descent.steps, H - 1)
    broker.hears_pull()
    broker.serves(filled(descent, 100), version(0))
    push, delta = broker.takes_push()
    assert (push.base, first(delta)) == (version(1), H), "measured from what is held"
    broker.serves(filled(descent, 50), version(1), push.push_id)
    steps()


def test_broker_without_parameters_is_given_those_that_are_held(
    broker: ScriptedBroker, begin: Make, resume: Resume
) -> None:
    worker, descent = begin()
    descent.steps(2)
    life = resume(saved_by(worker, descent))
    broker.says(Notice("donate", fragment=0))
    donation, given = broker.takes_push()
    assert (donation.base, first(given)) == (version(0), 100), "not those of the model"
    broker.says(Released(0, version(0), Ledger()))
    life.started()
    assert at(life.descent) == 98


def test_run_that_was_started_again_in_another_shape_is_joined_as_by_a_new_worker(
    broker: ScriptedBroker, begin: Make, resume: Resume, caplog: pytest.LogCaptureFixture
) -> None:
    worker, descent = begin()
    descent.steps(2)
    saved = saved_by(worker, descent)
    broker.config = run_config(fragment_sync_delay=1)
    life = resume(saved, version(2))
    pull = broker.hears_pull()
    assert pull.held_version is None
    broker.serves(filled(descent, 500), version(2))
    life.started()
    assert at(life.descent) == 500
    assert "it has fragment_sync_delay 0, the run has 1 now" in caplog.text
    assert life.worker.local_step == 2


def test_worker_takes_the_id_that_it_had(
    broker: ScriptedBroker, begin: Make, resume: Resume
) -> None:
    worker, descent = begin()
    life = resume(saved_by(worker, descent), version(0), worker_id=None)
    assert life.join.worker_id == life.worker.worker_id == "me"


def test_worker_with_another_id_takes_over_the_counters_and_nothing_else(
    broker: ScriptedBroker, begin: Make, resume: Resume, caplog: pytest.LogCaptureFixture
) -> None:
    worker, descent = begin()
    descent.steps(2)
    life = resume(saved_by(worker, descent), version(0), worker_id="you")
    assert (life.join.worker_id, life.join.run) == ("you", None)
    assert "state is that of worker 'me', this one is 'you'" in caplog.text
    broker.hears_pull()
    broker.serves(filled(descent, 100), version(0))
    life.started()
    assert at(life.descent) == 100
    assert life.worker.local_step == 2


def test_state_without_parameters_begins_with_those_of_the_run(
    broker: ScriptedBroker, beside: Beside, begin: Make, resume: Resume
) -> None:
    worker, descent = begin()
    descent.steps(1)
    state, tensors = saved_by(worker, descent)
    life = resume(({**state, "resume": None}, tensors), version(0))
    assert life.join.run is None
    broker.hears_pull()
    broker.serves(filled(descent, 100), version(0))
    life.started()
    assert at(life.descent) == 100
    steps = beside(life.descent.steps, H - 1)
    push, _ = broker.takes_push()
    assert push.steps == H - 1, "the place in the cycle is kept"
    broker.serves(filled(descent, 0), version(1), push.push_id)
    steps()


def test_push_in_doubt_is_offered_behind_the_pull_for_the_next_version(ready: Desk) -> None:
    """Then the broker tells of a version before it grants what follows from it."""
    ready.happens(Doubt(0, frozenset()), Offer(gradient(77)))
    assert not ready.sent(Push)
    ready.hears(Released(0, version_of(0), Ledger()))
    sent = [e.message for e in ready.all(Send) if isinstance(e.message, Pull | Push)]
    assert [type(message) for message in sent] == [Pull, Push]
    assert isinstance(sent[0], Pull) and sent[0].after == 0


def test_push_of_a_later_stay_is_a_stranger_no_more_once_one_has_counted(ready: Desk) -> None:
    ready.happens(Doubt(0, frozenset()), Offer(gradient(77)))
    ready.hears(Released(0, version_of(0), Ledger()))
    ready.receives(version_of(1), Ledger({"me": (Counted(77),)}))
    ready.holds(version_of(1))
    ready.happens(Offer(gradient(78, base=1)))
    assert [push.push_id for push in ready.sent(Push)] == [78], "at once"


# What the broker's version means.


def ground(*known: int) -> Ground:
    base = values(Descent())
    return Ground(version(5), Ledger({"me": tuple(map(Counted, known))}), base, Work(3), None)


def arrival(what: VersionId, ledger: Mapping[str, tuple[Counted, ...]]) -> Arrival:
    return Arrival(Released(0, what, Ledger(ledger)), frozenset(), None)


def test_ledger_that_may_have_forgotten_the_worker_drops_its_steps() -> None:
    others = {f"other {number}": (Counted(number),) for number in range(ABSENT_REMEMBERED)}
    found = compared("me", ground(1), arrival(version(900), others))
    assert found is not None
    assert "no longer knows" in str(found.superseding)
    del others["other 0"]
    assert compared("me", ground(1), arrival(version(900), others)) is None, "it remembers all"


@pytest.mark.parametrize("partly", [None, b"\1"])
def test_push_that_is_unknown_is_a_stranger_even_if_only_a_part_of_it_counted(
    partly: bytes | None,
) -> None:
    found = compared("me", ground(1), arrival(version(6), {"me": (Counted(1), Counted(2, partly))}))
    assert found is not None
    assert "earlier life" in str(found.superseding)
    assert compared("me", ground(1), arrival(version(6), {"you": (Counted(2),)})) is None


def test_version_of_another_run_takes_the_place_of_what_is_there() -> None:
    found = compared("me", ground(), arrival(VersionId("b" * 16, 5, 1), {}))
    assert found is not None
    assert "b" * 16 in str(found.superseding)


# The state itself.


def tensors_in(plain: Any) -> list[Tensor]:
    if isinstance(plain, Tensor):
        return [plain]
    parts = plain.values() if isinstance(plain, dict) else plain
    return [t for part in parts for t in tensors_in(part)] if isinstance(plain, dict | list) else []


def test_state_is_one_copy_of_the_model_that_training_never_touches(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    worker, descent = begin()
    descent.steps(1)
    state = worker.state_dict()
    (base,) = tensors_in(state)
    assert base.dtype == torch.float32
    assert base.numel() == sum(p.numel() for p in descent.model.parameters())
    for number in (1, 2, 3):
        steps = beside(descent.steps, H if number > 1 else H - 1)
        push, _ = broker.takes_push()
        broker.serves(filled(descent, number), version(number), push.push_id)
        steps()
    assert set(base.tolist()) == {100}


def test_dict_that_was_loaded_is_never_written_to(
    broker: ScriptedBroker, beside: Beside, begin: Make, resume: Resume
) -> None:
    worker, descent = begin()
    descent.steps(1)
    saved = saved_by(worker, descent)
    life = resume(saved, version(0))
    says_current(broker, version(0))
    life.started()
    for number in (1, 2, 3):
        steps = beside(life.descent.steps, H if number > 1 else H - 1)
        if number == 1:
            says_current(broker, version(0))
        push, _ = broker.takes_push()
        broker.serves(filled(descent, number), version(number), push.push_id)
        steps()
    (base,) = tensors_in(saved[0])
    assert set(base.tolist()) == {100}


def test_state_that_was_loaded_can_be_saved_again_before_the_start(begin: Make, make: Make) -> None:
    worker, descent = begin()
    descent.steps(1)
    state = saved_by(worker, descent)[0]
    again, _ = make()
    again.load_state_dict(state)
    assert again.state_dict()["resume"] is state["resume"]


def test_model_that_was_not_loaded_is_found_out_before_anything_is_sent(
    broker: ScriptedBroker, begin: Make, make: Make
) -> None:
    worker, descent = begin()
    descent.steps(3)
    state = saved_by(worker, descent)[0]
    again, _ = make()  # the model is as it was made
    again.load_state_dict(state)
    with pytest.raises(UsageError, match="load the model's own checkpoint"):
        again.start()
    broker.hears_nothing_of(Join, 0.1)


def broken(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], object]:
    return lambda state: change(state["resume"])


@pytest.mark.parametrize(
    ("breaks", "words"),
    [
        (lambda s: s.pop("metrics"), "'metrics'"),
        (lambda s: s.update(resume=5), "5 is not a dict"),
        (lambda s: s.update(cycle_start=9), "cycle began at step 9, and it is at step 5"),
        (broken(lambda r: r.update(format=2)), "format 2, this release reads 1"),
        (broken(lambda r: r.pop("fragments")), "lacks 'fragments'"),
        (broken(lambda r: r.update(fragments=[])), "0 fragments instead of 1"),
        (broken(lambda r: r["config"].update(colour=1)), "colour"),
        (broken(lambda r: r["place"].update(slot=1)), "slot 1 of 1"),
        (broken(lambda r: r["place"].update(cursor="x")), "'x' is not a whole number"),
        (broken(lambda r: r["model"][0].__setitem__(0, "w")), "another model than this one"),
        (broken(lambda r: r["fragments"][0].pop("base")), "lacks 'base'"),
        (broken(lambda r: r["fragments"][0].update(version=["a", 1])), "unpack"),
        (broken(lambda r: r["fragments"][0].update(steps=None)), "None is not a whole number"),
        (
            broken(lambda r: r["fragments"][0]["base"].update(parameters=[1.0])),
            "a list, not a tensor",
        ),
        (
            broken(lambda r: r["fragments"][0]["base"].update(parameters=torch.zeros(3))),
            r"torch.float32\[3\], not torch.float32\[12\]",
        ),
        (
            broken(
                lambda r: r["fragments"][0]["flight"]["wire"].update(
                    parameters=torch.zeros(12).half()
                )
            ),
            r"torch.float16\[12\], not torch.float32\[12\]",
        ),
        (broken(lambda r: r["fragments"][0]["flight"].update(push_id="xyz")), "xyz"),
        (broken(lambda r: r["fragments"][0]["flight"].update(wire_dtype="int3")), "int3"),
    ],
)
def test_state_that_cannot_be_used_is_refused_with_a_sentence(
    broker: ScriptedBroker,
    begin: Make,
    make: Make,
    breaks: Callable[[dict[str, Any]], object],
    words: str,
) -> None:
    broker.config = run_config(fragment_sync_delay=2)
    worker, descent = begin()
    descent.steps(H + 1)
    state = saved_by(worker, descent)[0]
    breaks(state)
    again, _ = make()
    before = again.state_dict()
    with pytest.raises(UsageError, match=words) as refused:
        again.load_state_dict(state)
    assert str(refused.value).endswith(".")
    assert again.state_dict() == before, "nothing has changed"


def test_state_of_another_model_names_the_tensors(begin: Make, make: Make) -> None:
    worker, descent = begin()
    state = saved_by(worker, descent)[0]
    other, _ = make(nn.Linear(3, 5))
    with pytest.raises(UsageError, match=r"weight is shaped \[3, 3\] instead of \[5, 3\]"):
        other.load_state_dict(state)
