"""The progress that a script sees of its run: rounds, steps, tokens, and the loss of all workers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco_broker import Broker
from diloco_protocol.messages import Progress
from diloco_worker import DiLoCoWorker
from kit.whole_run import an_mlp, make_config, run, trainees

pytest_plugins = ("kit.worker_fixtures",)


def test_progress_is_zero_without_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DILOCO_SERVER", raising=False)
    each = an_mlp(0)
    with DiLoCoWorker(each.model, each.optimizer) as diloco:
        each.step()
        assert (diloco.round, diloco.global_loss, diloco.progress) == (0, None, Progress())


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
