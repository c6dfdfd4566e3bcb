"""Lists of parts and optimizers in a run, and invalid arguments: each raises a sentence at once."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from diloco_broker import Broker
from diloco_protocol import Refused, UsageError
from diloco_worker import DiLoCoWorker
from kit.whole_run import make_config

PATIENCE_S = 20.0


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker(make_config(workers=1, sync_every=2)) as made:
        yield made


class Pipeline:
    """Two parts of a model with an optimizer each, as in torchtitan's loop."""

    def __init__(self) -> None:
        self.parts = [nn.Sequential(), nn.Sequential()]
        self.parts[0].add_module("first", nn.Linear(2, 3))
        self.parts[1].add_module("second", nn.Linear(3, 2))
        self.optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in self.parts]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.parts[1](self.parts[0](torch.ones(1, 2))).sum().backward()
        for optimizer in self.optimizers:
            optimizer.step()

    def worker(self, **keywords: Any) -> DiLoCoWorker:
        return DiLoCoWorker(self.parts, self.optimizers, timeout=PATIENCE_S, **keywords)


def test_parts_and_optimizers_in_lists_train_and_resume_from_a_checkpoint(broker: Broker) -> None:
    pipeline, states = Pipeline(), []
    with pipeline.worker(server=broker.address, worker_id="a") as worker:
        for _ in range(5):
            pipeline.step()
        assert (worker.local_step, worker.sync_count) == (5, 2)
        states = [worker.state_dict(), *(part.state_dict() for part in pipeline.parts)]
        with pytest.raises(UsageError, match="worker 'a'"):
            DiLoCoWorker(pipeline.parts[1], pipeline.optimizers[1], server=broker.address)
    again = Pipeline()
    for part, state in zip(again.parts, states[1:], strict=True):
        part.load_state_dict(state)
    second = again.worker(server=broker.address)
    second.load_state_dict(states[0])
    with second:
        again.step()
        assert (second.local_step, second.sync_count) == (6, 3)
    assert not any(optimizer._optimizer_step_post_hooks for optimizer in again.optimizers)


def test_a_worker_starts_once(broker: Broker) -> None:
    pipeline = Pipeline()
    with pipeline.worker(server=broker.address) as worker:
        with pytest.raises(UsageError, match="starts once"), worker:
            pass
        for _ in range(2):
            pipeline.step()
        assert worker.sync_count == 1, "the running worker continues"


def test_unrelated_or_unknown_model_or_optimizer_is_refused() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    fits, around, astray = (
        torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, model, other)
    )
    # DeepSpeed, which is not installed here, is recognized by the names of its classes.
    of_deepspeed = {"__module__": "deepspeed.runtime.engine"}
    engine = type("DeepSpeedEngine", (nn.Module,), of_deepspeed)()
    zero = type("DeepSpeedZeroOptimizer", (), of_deepspeed)()
    vars(around)["optimizer"] = zero
    anything: Any = DiLoCoWorker
    for of, by, words in (
        (model, astray, "SGD"),
        (model, [fits, astray], "SGD"),
        (model, [], "optimizer is an empty list"),
        (model, [fits, "adam"], "optimizer is a str"),
        ("model", fits, "model is a str"),
        ([model, "model"], fits, "The model is a str"),
        (engine, fits, "DeepSpeed"),
        *((model, each, "DeepSpeed") for each in (zero, [fits, zero], around)),
    ):
        with pytest.raises(UsageError, match=words):
            anything(of, by)


def test_unexpected_run_is_refused_with_both_values(broker: Broker) -> None:
    worker = Pipeline().worker(server=broker.address, expect={"num_fragments": 3})
    with pytest.raises(Refused, match=r"num_fragments=3.*num_fragments=1"):
        worker.start()
    with Pipeline().worker(server=broker.address, expect={"num_fragments": 1}) as fits:
        assert fits.config is not None and fits.config.num_fragments == 1


class DTensor(torch.Tensor):
    """A sharded parameter, by the name of its type."""


DTensor.__module__ = "torch.distributed.tensor"


def test_sharded_parameters_are_refused(broker: Broker) -> None:
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.zeros(2, 2).as_subclass(DTensor))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="weight is a DTensor"):
        DiLoCoWorker(model, optimizer, server=broker.address)


def test_report_before_the_start_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    worker = Pipeline().worker(server="tcp://127.0.0.1:1", worker_id="forgotten")
    for _ in range(3):
        worker.report(loss=1.0)
    assert caplog.text.count("was made but not started") == 1


@pytest.mark.parametrize(("keyword", "advice"), [("sync_evry", "mean sync_every"), ("nothing", "")])
def test_unknown_keyword_is_refused_with_the_nearest(keyword: str, advice: str) -> None:
    pipeline = Pipeline()
    with pytest.raises(UsageError, match=f"'{keyword}'.*{advice}"):
        pipeline.worker(**{keyword: 5})
