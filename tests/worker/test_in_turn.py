"""A run inside one process: workers that one thread steps in turn, or each its own thread."""

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco_broker import Broker
from diloco_protocol.messages import Progress
from diloco_worker import DiLoCoWorker, testing
from diloco_worker.testing import LocalRun, RunStalled
from kit.reference import Outcome, Plan, Trainee, one_thread, state_of, streaming
from kit.whole_run import an_mlp, assert_same, make_config, options_of, run, strided, trainees

pytest_plugins = ("kit.worker_fixtures",)


EXACT: dict[str, Any] = {"wire_dtype": "fp32", "chunk_elements": 16}
EXACT["outer_momentum_warmup"] = "constant"


@contextmanager
def local(trained: Sequence[Trainee], **options: Any) -> Iterator[tuple[LocalRun, list[Any]]]:
    """A run with these workers, all driven by the test's thread."""
    options = {"workers": len(trained), "patience": 20.0, **EXACT, **options}
    with one_thread(), ExitStack() as stack:
        run = stack.enter_context(LocalRun(**options))
        hooks = [
            stack.enter_context(
                DiLoCoWorker(each.model, each.optimizer, server=run.server, worker_id=f"w{number}")
            )
            for number, each in enumerate(trained)
        ]
        yield run, hooks


@pytest.mark.parametrize(
    ("plan", "workers"),
    [
        (Plan(4, strided(1)), 3),
        (Plan(6, strided(3)), 2),
        (Plan(6, strided(3), delay=1, alpha=0.5), 2),
        (Plan(9, strided(3), delay=2, alpha=None), 3),
    ],
)
def test_workers_of_one_thread_train_as_in_separate_processes(plan: Plan, workers: int) -> None:
    """Bit for bit after each step of all: the first one's boundary ends with that of the last."""
    ours, steps = trainees(workers), 2 * plan.sync_every + 3
    histories: list[list[Any]] = [[] for _ in ours]
    with local(ours, **options_of(plan)) as (run, hooks):
        for _ in range(steps):
            for each in ours:
                each.step()
            for history, each in zip(histories, ours, strict=True):
                history.append(state_of(each.model))
        assert [hook.sync_metrics.last_error for hook in hooks] == [None] * workers
        final = run.global_parameters()
    wanted = streaming(trainees(workers), steps, plan)
    if plan.delay:  # pushes in flight at the end count later
        final = wanted.final
    assert_same(Outcome(histories, final), wanted, exact=True)


def test_asynchronous_workers_of_one_thread_do_not_wait() -> None:
    ours = trainees(2)
    with local(ours, sync_every=2, mode="async") as (_, hooks):
        for _ in range(6):
            for each in ours:
                each.step()
        assert [hook.sync_count for hook in hooks] == [3, 3]


def test_worker_that_overtakes_warns_once_and_ends(caplog: pytest.LogCaptureFixture) -> None:
    one, other = ours = trainees(2)
    with local(ours, sync_every=3) as (_, hooks), caplog.at_level(logging.WARNING):
        for _ in range(9):
            one.step()
        assert hooks[0].sync_count == 0
        for _ in range(9):
            other.step()
        one.step()
        assert all(hook.sync_count >= 1 for hook in hooks)
    said = [text for text in caplog.messages if "makes steps while its round waits for w1" in text]
    assert len(said) == 1


def test_round_that_lacks_a_worker_raises_with_its_name() -> None:
    (one,) = trainees(1)
    wanted = re.escape("the run has 2 workers and 1 of them are here")
    with local([one], workers=2, sync_every=2, patience=0.3):
        one.step()
        with pytest.raises(RunStalled, match=wanted):
            one.step()


def test_forced_boundary_ends_for_all_with_the_last_call() -> None:
    ours = trainees(2)
    with local(ours, sync_every=50, num_fragments=3, fragment_sync_delay=0) as (run, hooks):
        for each in ours:
            each.step()
        assert [hook.force_sync() for hook in hooks] == [False, True]
        one, other = (state_of(each.model) for each in ours)
        final = run.global_parameters()
        assert all(torch.equal(one[name], other[name]) for name in one)
        assert all(torch.equal(one[name], final[name]) for name in one)


def test_leaving_worker_does_not_wait_for_others_of_its_thread() -> None:
    """It leaves within the test's time limit, far below that of a boundary, and its push counts."""
    one, other = ours = trainees(2)
    with local(ours, sync_every=2, patience=20.0) as (_, hooks):
        for _ in range(2):
            one.step()
        hooks[0].close()
        for _ in range(2):
            other.step()
        assert hooks[1].sync_count == 1
        assert hooks[1].round == 1


def test_error_of_one_thread_is_raised_and_ends_the_others() -> None:
    with LocalRun(sync_every=2) as run:
        ended = []

        def train(number: int) -> None:
            each = an_mlp(number)
            with DiLoCoWorker(each.model, each.optimizer, server=run.server) as hook:
                for _ in range(2):  # until both have joined
                    each.step()
                if number == 0:
                    raise ValueError("the data are gone")
                while not hook.should_stop:
                    each.step()
                ended.append(number)

        with pytest.raises(ValueError, match="the data are gone"):
            run.train(train)
        assert ended == [1]


def test_local_run_opens_no_port_and_leaves_nothing_behind() -> None:
    with LocalRun() as run:
        folder = Path(run.server.removeprefix("ipc://")).parent
        assert run.server.startswith("ipc://") and run.broker.feed_address.startswith("ipc://")
        assert folder.exists()
    assert not folder.exists()


def test_old_name_of_the_exception_still_works() -> None:
    with pytest.warns(DeprecationWarning, match="RunStalled"):
        assert testing.RunStandsStill is RunStalled


def test_workers_see_the_same_progress_and_a_late_one_before_its_first_step() -> None:
    seen: dict[tuple[int, int], tuple[int, float | None, Progress]] = {}

    def report(hook: DiLoCoWorker, worker: int, _: int) -> None:
        hook.report(loss=1.0 + 2 * worker, tokens=10)

    def look(hook: DiLoCoWorker, worker: int, step: int) -> None:
        seen[worker, step] = (hook.round, hook.global_loss, replace(hook.progress, seconds=0))

    config = make_config(workers=2, sync_every=3)
    with Broker(config) as broker:
        run(broker, trainees(2), 6, before=report, after=look)
        each = an_mlp(2)
        late = DiLoCoWorker(each.model, each.optimizer, server=broker.address)
        with late:
            assert replace(late.progress, seconds=0) == Progress(rounds=2, steps=6, tokens=120)
            assert (late.round, late.global_loss) == (2, 2.0)
    for worker in (0, 1):
        assert seen[worker, 1] == (0, None, Progress())
        assert seen[worker, 2] == (1, 2.0, Progress(rounds=1, steps=3, tokens=60))
        assert seen[worker, 5][2] == Progress(rounds=2, steps=6, tokens=120)
