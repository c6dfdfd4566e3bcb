"""Merges that are broken off at any tensor, by an error or by Ctrl-C: what has been counted counts once.

Each optimizer step lowers every value by 1, from 100. A run whose merge is broken off is compared with
the same run that nothing happened to: the next pseudo-gradient and the model must be equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from diloco_protocol.messages import Error, Push
from diloco_worker import DiLoCoWorker
from diloco_worker.training.fragment_sync import FragmentSync
from kit.scripted_broker import Beside, Descent, ScriptedBroker, scripted_broker, version
from kit.uniform_model import at, filled, first, until

H = 4
TENSORS = 4


class Breaks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Breaks off what is going on when the model is copied into for the nth time.

    An error comes before that tensor is changed, as where memory runs out; Ctrl-C comes behind it.
    """

    def __init__(self, model: nn.Module, nth: int | None, error: type[BaseException]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.left = nth
        self.error = error
        self.tensors = {parameter.data_ptr() for parameter in model.parameters()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        breaks = False
        if func is torch.ops.aten.copy_.default and args[0].data_ptr() in self.tensors:
            breaks = self.left == 0
            self.left = None if self.left is None else self.left - 1
        if breaks and issubclass(self.error, Exception):
            raise self.error("out of memory")
        result = func(*args, **(kwargs or {}))
        if breaks:
            raise self.error
        return result


@dataclass
class Story:
    """A worker that has joined at a scripted broker, whose merges may be broken off."""

    broker: ScriptedBroker
    worker: DiLoCoWorker
    descent: Descent
    beside: Beside
    breaks: Breaks

    def trains(self, steps: int) -> Callable[[], Any]:
        """Begin optimizer steps in another thread, in a loop that goes on after Ctrl-C."""

        def loop() -> None:
            for _ in range(steps):
                try:
                    with self.breaks:
                        self.descent.steps(1)
                except KeyboardInterrupt:
                    pass

        return self.beside(loop)

    def counts(self, push: Push, value: float = 1000) -> None:
        """A version contains the push; every value of it is this one."""
        self.broker.serves(filled(self.descent, value), version(1), push.push_id)

    def refuses(self, push: Push, code: str = "bad_push") -> None:
        self.broker.says(Error(code, "No.", push_id=push.push_id))

    def has_news(self) -> None:
        until(lambda: bool(self.worker._link and self.worker._link.has_news))


def counted_at_the_boundary(story: Story) -> int:
    steps = story.trains(H)
    story.counts(story.broker.takes_push()[0])
    steps()
    return H


def refused_at_the_boundary(story: Story) -> int:
    steps = story.trains(H)
    story.refuses(story.broker.takes_push()[0])
    steps()
    return H


def counted_in_the_air(story: Story) -> int:
    story.trains(H)()
    story.counts(story.broker.takes_push()[0])
    story.has_news()
    return H


def refused_in_the_air(story: Story) -> int:
    story.trains(H)()
    push, _ = story.broker.takes_push()
    story.trains(1)()
    story.refuses(push)
    story.has_news()
    return H + 1


def dropped_as_late(story: Story) -> int:
    """Its steps are taken out of the model, which then moves on to newer parameters."""
    story.trains(H)()
    story.refuses(story.broker.takes_push()[0], "late")
    story.has_news()
    story.trains(2)()
    story.broker.hears_pull()
    story.counts(Push(b"", 1, 0, 0, "fp32"))
    story.has_news()
    return H + 2


def counted_long_after(story: Story) -> int:
    """Training has ceased to wait for it."""
    story.trains(H + 1)()
    story.counts(story.broker.takes_push()[0])
    story.has_news()
    return H + 1


@dataclass(frozen=True)
class Plot:
    """How the first push ends.

    `opens` returns how many steps have been made. `copies`: how often tensors are copied into.
    """

    opens: Callable[[Story], int]
    config: dict[str, Any] = field(default_factory=dict)
    copies: int = TENSORS
    timeout: float = 600.0


LATER = {"fragment_sync_delay": 2}
PLOTS = {
    "plain": Plot(counted_at_the_boundary),
    "alpha at once": Plot(counted_at_the_boundary, {"fragment_update_alpha": 0.5}),
    "plain later": Plot(counted_in_the_air, LATER),
    "alpha": Plot(counted_in_the_air, LATER | {"fragment_update_alpha": 0.25}),
    "rebase": Plot(counted_in_the_air, LATER | {"fragment_merge": "rebase"}),
    "late": Plot(counted_long_after, timeout=0.2),
    "late alpha": Plot(counted_long_after, {"fragment_update_alpha": 0.5}, timeout=0.2),
    "late rebase": Plot(counted_long_after, {"fragment_merge": "rebase"}, timeout=0.2),
    "refused": Plot(refused_at_the_boundary),
    "refused later": Plot(refused_in_the_air, LATER),
    "refused rebase": Plot(refused_in_the_air, LATER | {"fragment_merge": "rebase"}),
    "dropped and moved": Plot(dropped_as_late, LATER, copies=2 * TENSORS),
}
ERRORS = [MemoryError, KeyboardInterrupt]


@contextmanager
def a_story(
    plot: Plot, beside: Beside, nth: int | None = None, error: type[BaseException] = MemoryError
) -> Iterator[Story]:
    with scripted_broker(**plot.config) as broker:
        descent = Descent(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        worker = DiLoCoWorker(
            descent.model,
            descent.optimizer,
            server=broker.address,
            worker_id="me",
            timeout=plot.timeout,
        )
        started = beside(worker.start)
        broker.welcomes(version(0))
        broker.hears_pull()
        broker.serves(filled(descent, 100), version(0))
        started()
        try:
            yield Story(broker, worker, descent, beside, Breaks(descent.model, nth, error))
        finally:
            worker.close(failed=True)


def told(
    plot: Plot, beside: Beside, nth: int | None = None, error: type[BaseException] = MemoryError
) -> tuple[float, float, float]:
    """The next pseudo-gradient, the model in front of its merge, and behind the next boundary."""
    with a_story(plot, beside, nth, error) as story:
        made = plot.opens(story)
        steps = story.trains(2 * H - made)
        push, delta = story.broker.takes_push()
        before = at(story.descent)
        story.broker.serves(filled(story.descent, 500), version(2), push.push_id)
        steps()
        story.trains(H - 1)()
        assert story.breaks.left is None or story.breaks.left < 0, "it was never broken off"
        return first(delta), before, at(story.descent)


@pytest.fixture
def beside() -> Iterator[Beside]:
    made = Beside()
    yield made
    made.close()


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("name", PLOTS)
def test_merge_that_is_broken_off_is_gone_on_with_and_counts_once(
    name: str, error: type[BaseException], beside: Beside
) -> None:
    plot = PLOTS[name]
    wanted = told(plot, beside)
    for nth in range(plot.copies):
        assert told(plot, beside, nth, error) == wanted, f"broken off at copy {nth}"


def parameters(story: Story) -> Tensor:
    return torch.cat([each.detach().flatten() for each in story.descent.model.parameters()])


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("nth", range(TENSORS))
def test_model_that_is_not_finite_is_restored_though_that_is_broken_off(
    nth: int, error: type[BaseException], beside: Beside
) -> None:
    with a_story(Plot(counted_in_the_air, LATER), beside, nth, error) as story:
        story.trains(H - 1)()
        with torch.no_grad():
            next(story.descent.model.parameters()).fill_(float("nan"))
        story.trains(2)()
        assert story.worker.sync_metrics.rejected == 1
        later = parameters(story)
        assert set(later.tolist()) <= {100.0, 99.0}, "the base, and perhaps the step made since"
        story.trains(H - 1)
        _, delta = story.broker.takes_push()
        assert delta.norm() <= 12**0.5 * H


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("nth", range(TENSORS))
def test_loading_that_is_broken_off_is_gone_on_with_behind_the_next_step(
    nth: int, error: type[BaseException], beside: Beside
) -> None:
    with a_story(Plot(counted_in_the_air, LATER), beside, nth, error) as story:
        story.trains(2)()

        def loads() -> bool | None:
            try:
                with story.breaks:
                    return story.worker.load_global()
            except KeyboardInterrupt:
                return None

        loaded = beside(loads)
        story.broker.hears_pull()
        story.counts(Push(b"", 1, 0, 0, "fp32"))
        assert not loaded()
        story.trains(1)()
        assert at(story.descent) == 1000 - 1


def test_state_that_is_saved_while_a_merge_is_broken_off_holds_no_parameters(
    beside: Beside, caplog: pytest.LogCaptureFixture
) -> None:
    """They would not be those of any moment: a part of the model is ahead of the rest."""
    with a_story(Plot(counted_in_the_air, LATER), beside, 2, KeyboardInterrupt) as story:
        counted_in_the_air(story)
        story.trains(2)()
        assert story.worker.sync_metrics.unsynced_steps == H + 2
        assert story.worker.state_dict()["resume"] is None
        assert "Save again" in caplog.text
        story.trains(1)()
        assert story.worker.state_dict()["resume"] is not None
        assert story.worker.sync_metrics.unsynced_steps == 0


def test_merge_that_is_interrupted_before_it_touches_the_model_has_not_begun(
    beside: Beside, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that is written then holds all of it."""
    with a_story(Plot(counted_in_the_air, LATER), beside) as story:
        counted_in_the_air(story)
        work_out = FragmentSync._change_of

        def interrupted(*_: Any) -> None:
            monkeypatch.setattr(FragmentSync, "_change_of", work_out)
            raise KeyboardInterrupt

        monkeypatch.setattr(FragmentSync, "_change_of", interrupted)
        story.trains(2)()
        assert FragmentSync._change_of is work_out, "it was never interrupted"
        assert story.worker.state_dict()["resume"] is not None
        story.trains(1)()
        assert story.worker.sync_metrics.rounds == 1


def test_worker_that_leaves_finishes_the_merge_first(beside: Beside) -> None:
    with a_story(Plot(counted_in_the_air, LATER), beside, 2, KeyboardInterrupt) as story:
        counted_in_the_air(story)
        story.trains(2)()
        assert len(set(parameters(story).tolist())) == 2, "torn"
        story.worker.close()
        assert at(story.descent) == 1000
        assert story.worker.state_dict()["resume"] is not None


def test_worker_that_leaves_finishes_a_move_to_newer_parameters_first(beside: Beside) -> None:
    """There is no delta in flight any more that leaving would wait for."""
    plot = PLOTS["dropped and moved"]
    with a_story(plot, beside, TENSORS + 2, KeyboardInterrupt) as story:
        plot.opens(story)
        story.trains(1)()
        assert len(set(parameters(story).tolist())) == 2, "torn"
        story.worker.close()
        assert len(set(parameters(story).tolist())) == 1
        assert story.worker.state_dict()["resume"] is not None


@pytest.mark.parametrize("is_offered", [False, True])
def test_interrupt_between_freezing_and_offering_sends_the_push_once(
    is_offered: bool, beside: Beside
) -> None:
    with a_story(Plot(counted_in_the_air, LATER), beside) as story:
        link: Any = story.worker._link
        offer = link.offer

        def interrupted(*arguments: Any) -> None:
            link.offer = offer
            if is_offered:
                offer(*arguments)
            raise KeyboardInterrupt

        link.offer = interrupted
        story.trains(H + 1)()
        push, delta = story.broker.takes_push()
        assert (push.steps, first(delta)) == (H, H)
        story.broker.hears_nothing_of(Push, 0.1)
        story.counts(push)
        story.has_news()
        steps = story.trains(H - 1)
        push, delta = story.broker.takes_push()
        assert (push.steps, first(delta)) == (H, H - 2), "two were overwritten at the apply point"
        steps()


@pytest.mark.parametrize("config", [{}, {"fragment_merge": "rebase"}], ids=["alpha", "rebase"])
def test_steps_behind_an_interrupted_wait_are_kept(config: dict[str, Any], beside: Beside) -> None:
    """In a notebook: Ctrl-C while the others are waited for, and the loop is run again."""
    with a_story(Plot(counted_at_the_boundary, config), beside) as story:
        link: Any = story.worker._link
        wait_for = link.wait_for

        def interrupted(*_: Any) -> None:
            link.wait_for = wait_for
            raise KeyboardInterrupt

        link.wait_for = interrupted
        story.trains(H)()
        push, delta = story.broker.takes_push()
        assert first(delta) == H
        step = story.trains(1)
        story.counts(push)
        step()
        assert at(story.descent) == 1000 - 1
        story.trains(H - 1)
        assert first(story.broker.takes_push()[1]) == H
