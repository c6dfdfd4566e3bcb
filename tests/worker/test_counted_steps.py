"""Which steps count, their pace, and the script's reports."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from diloco_protocol import UsageError
from diloco_protocol.messages import Heartbeat, Notice
from diloco_worker.counted_steps import CountedSteps, Pace
from diloco_worker.reports import LOOK_S, Reports
from diloco_worker.session.news import Work
from kit.scripted_training import H, ScriptedTraining

pytest_plugins = ("kit.worker_fixtures",)


class Counted:
    """A loop whose steps are counted, with one layer an optimizer: the steps "ab" are one of each."""

    def __init__(self, count: int = 1) -> None:
        self.model = nn.ModuleList(nn.Linear(1, 1) for _ in range(count))
        optimizers = tuple(torch.optim.SGD(each.parameters(), lr=0.1) for each in self.model)
        self.optimizers, self.count = optimizers, 0
        self.told: list[str] = []
        self.steps = CountedSteps(self.model, optimizers, stepped=self._step, tell=self.told.append)
        self.steps.start()

    def _step(self) -> None:
        self.count += 1

    def counts(self, order: str) -> list[int]:
        """The count after each of these steps."""
        counts = []
        for letter in order:
            self.optimizers["abc".index(letter)].step()
            counts.append(self.count)
        return counts


@pytest.fixture
def counted() -> Iterator[Counted]:
    made = Counted()
    yield made
    made.steps.stop()


@pytest.mark.parametrize("is_fused", [False, True], ids=["skipped", "skipped inside a fused step"])
def test_step_skipped_by_an_amp_scaler_does_not_count(counted: Counted, is_fused: bool) -> None:
    (model,), (optimizer,) = counted.model, counted.optimizers
    if is_fused:  # as SGD(..., fused=True) does; the scaler then calls step() always
        optimizer.param_groups[0]["fused"] = True
        optimizer._step_supports_amp_scaling = True
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for overflows in (False, True, True, False):
        optimizer.zero_grad()
        loss = model(torch.ones(1, 1)).sum() * (float("inf") if overflows else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert counted.count == 2


def test_step_captured_in_a_cuda_graph_does_not_count_and_is_logged_once(
    counted: Counted, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No kernel runs while they are recorded; replaying them later calls no hook."""
    counted.counts("aaaa")
    with monkeypatch.context() as cuda:
        cuda.setattr(torch.cuda, "is_initialized", lambda: True)
        cuda.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        counted.counts("aa")
    said = [record for record in caplog.records if "CUDA graph" in record.getMessage()]
    assert [record.levelno for record in said] == [logging.ERROR]
    assert "replay" in str(counted.steps.problem)
    assert counted.counts("a") == [5]


def steps_of(optimizer: torch.optim.Optimizer, number: int) -> None:
    for _ in range(number):
        optimizer.step()


def test_replaced_optimizer_warns_until_steps_are_counted_again(training: ScriptedTraining) -> None:
    """For example when layers are unfrozen during training and get a new optimizer."""
    training.begins(config={"sync_every": 10_000})
    training.steps(1)
    steps_of(torch.optim.AdamW(training.descent.model.parameters()), 120)
    text = "100 optimizer steps (AdamW) changed this model"
    assert str(training.metrics.last_error).startswith(text)
    assert "make a new one" in str(training.metrics.last_error)
    assert str(training.broker.hears(Heartbeat).warning).startswith(text)
    training.steps(1)
    training.broker.says(Notice("ping"))
    assert training.broker.hears(Heartbeat).warning is None


@contextmanager
def on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All tensors claim to be on a device that does not exist here."""
    with monkeypatch.context() as device:
        device.setattr(torch.Tensor, "device", property(lambda _: torch.device("cuda")))
        yield


def test_alternating_or_unrelated_optimizers_do_not_warn(counted: Counted) -> None:
    other = torch.optim.SGD(counted.model.parameters(), lr=0.0)
    for _ in range(3):  # as in meta-learning
        steps_of(other, 99)
        counted.counts("a")
    steps_of(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.0), 300)
    counted.steps.stop()
    steps_of(other, 300)
    assert counted.told == []


def test_pace_excludes_time_outside_training() -> None:
    pace = Pace()
    pace.resume(0.0)
    pace.step(2.0)
    assert pace.steps_per_s == 0.5
    pace.resume(100.0)  # after a boundary
    pace.leave_out(50.0)  # a call between two steps
    pace.step(152.0)
    assert pace.steps_per_s == 0.5


def test_device_reports_are_read_periodically(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = Reports()
    with on_an_accelerator(monkeypatch):
        reports.add(torch.tensor(9.0), torch.tensor(3), None)
        reports.add(torch.tensor(2.5), torch.tensor(4), None)
    reports.read(LOOK_S - 1)
    assert reports.totals == Work()
    reports.read(LOOK_S)
    assert reports.totals == Work(tokens=7, loss=2.5), "counts add up, the last loss is kept"
    reports.read(2 * LOOK_S)
    assert reports.totals == Work(tokens=7, loss=2.5), "once"


def test_invalid_count_warns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reports = Reports()
    with on_an_accelerator(monkeypatch):
        reports.add(None, torch.tensor(-7), None)
    reports.read(0, at_once=True)
    assert (reports.totals, "tokens" in str(reports.problem)) == (Work(), True)
    assert [each.levelno for each in caplog.records] == [logging.WARNING]
    reports.add(None, 5, None)
    assert reports.totals == Work(tokens=5)


@pytest.mark.parametrize("what", ["loss", "tokens", "samples"])
def test_report_refuses_all_but_a_number(training: ScriptedTraining, what: str) -> None:
    worker = training.begins()
    with pytest.raises(UsageError, match=rf"{what}.*\[2\]"):
        worker.report(**{what: torch.zeros(2)})
    on_meta = torch.zeros((), device="meta")
    strange: list[Any] = ["7", [1, 2], 1j, np.zeros(3), torch.tensor(1j), on_meta]
    for value in strange:
        with pytest.raises(UsageError, match=what):
            worker.report(**{what: value})
    worker.report(**{what: np.float32(2)})
    worker.report(**{what: torch.tensor([3])})


@pytest.mark.parametrize("what", ["tokens", "samples"])
def test_counts_too_large_for_a_message_are_refused(training: ScriptedTraining, what: str) -> None:
    worker = training.begins()
    worker.report(**{what: 2**53 - 2})
    for value in (2**64, 10**400, 2, -1, float("nan"), float("inf"), torch.tensor(-1)):
        with pytest.raises(UsageError, match=what):
            worker.report(loss=9.0, **{what: value})  # type: ignore[arg-type]
    worker.report(**{what: 1})
    push = training.round(H, 1)
    assert (getattr(push, what), push.loss) == (2**53 - 1, None), "what is refused changes nothing"


def test_unknown_keyword_of_a_report_names_the_nearest(training: ScriptedTraining) -> None:
    worker = training.begins()
    names = {
        "loss": ("los", "d_loss", "loss2", "losses"),
        "tokens": ("token", "tokes", "n_tokens", "num_tokens", "ntokens", "tokens_s"),
        "samples": ("sample", "sampels", "num_samples"),
    }
    for meant, given in names.items():
        for name in given:
            with pytest.raises(UsageError, match=f"'{name}'; did you mean {meant}"):
                worker.report(**{name: 5})
    with pytest.raises(UsageError, match="'lr'"):
        worker.report(tokens=3, lr=0.1)  # type: ignore[call-arg]
    push = training.round(H, 1)
    assert (push.loss, push.tokens) == (None, 0), "what is refused changes nothing"


@pytest.mark.parametrize(
    ("order", "counts"),
    [
        ("abab", [0, 1, 1, 2]),
        ("aaabaaab", [0, 0, 0, 1, 1, 1, 1, 2]),  # the discriminator of a GAN steps more often
        ("bbbabbba", [0, 0, 0, 0, 1, 1, 1, 1]),  # in any order
        ("babab", [0, 0, 1, 1, 2]),  # a scaler skipped the first step of a
    ],
)
def test_round_of_all_optimizers_is_one_step(order: str, counts: list[int]) -> None:
    several = Counted(2)
    assert several.counts(order) == counts
    several.steps.stop()
    assert several.counts("abab") == counts[-1:] * 4, "no longer counted"


def test_optimizer_that_never_steps_is_named() -> None:
    several = Counted(3)
    several.counts("ac" * 149)
    assert several.told == []
    several.counts("ac" * 150)
    (said,) = several.told
    assert "300 optimizer steps" in said and "optimizer 1 made no step" in said
    several.steps.stop()
    several.counts("ac" * 150)
    assert len(several.told) == 1, "nothing is reported after the end"


def test_workers_start_and_stop_while_other_threads_step() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    begun: list[Counted] = []

    def another_begins(stepped: object, *_: object) -> None:
        if stepped is optimizer:
            begun.append(Counted(2))

    # In the middle of a step, as another thread may.
    hook = register_optimizer_step_post_hook(another_begins)
    try:
        for _ in range(3):
            optimizer.step()
    finally:
        hook.remove()
        for each in begun:
            each.steps.stop()
    assert len(begun) == 3
