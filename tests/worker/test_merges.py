"""The model after each kind of reply, and merges that an error or Ctrl-C interrupts at any tensor.

Each optimizer step lowers every value by 1, from 100. An interrupted merge resumes after the next step,
and leads to the same model and the same next pseudo-gradient: what counted counts once.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from diloco_protocol.messages import Push
from diloco_worker.transport.inbox import Inbox
from kit.scripted_broker import version
from kit.scripted_training import H, ScriptedTraining

pytest_plugins = ("kit.worker_fixtures",)

TENSORS = 4


class Breaks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Interrupts when the model is copied into for the nth time.

    An error comes before that tensor is changed, as where memory runs out; Ctrl-C after it.
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


def begins(
    training: ScriptedTraining,
    config: dict[str, Any],
    *,
    nth: int | None = None,
    error: type[BaseException] = MemoryError,
) -> Breaks:
    """Join; merges of this worker may be interrupted."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    training.begins(model, config=config)
    training.around = breaks = Breaks(model, nth, error)
    return breaks


def values(training: ScriptedTraining) -> set[float]:
    every = [each.detach().flatten() for each in training.descent.model.parameters()]
    return set(torch.cat(every).tolist())


# The outcomes of the first push. Each returns how many steps were made.


def counted_at_the_boundary(training: ScriptedTraining) -> int:
    training.trains(H)
    training.serves(1000, 1, training.takes()[0])
    training.done()
    return H


def refused_at_the_boundary(training: ScriptedTraining) -> int:
    training.trains(H)
    training.refuses(training.takes()[0])
    training.done()
    return H


def counted_after(steps: int) -> Callable[[ScriptedTraining], int]:
    def counted(training: ScriptedTraining) -> int:
        training.steps(steps)
        training.brings(1000, 1, training.takes()[0])
        return steps

    return counted


def counted_after_giving_up(training: ScriptedTraining) -> int:
    """The boundary goes on, as if the broker had been silent for longer than the timeout."""
    state = Inbox.state
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Inbox, "state", lambda inbox, _, **known: state(inbox, 601.0, **known))
        training.steps(H + 2)
    training.brings(1000, 1, training.takes()[0])
    return H + 2


def refused_in_the_air(training: ScriptedTraining) -> int:
    training.steps(H)
    push, _ = training.takes()
    training.steps(1)
    training.refuses(push)
    training.hears_news()
    return H + 1


def dropped_as_late(training: ScriptedTraining) -> int:
    """Its steps are removed from the model, which then moves to newer parameters."""
    training.steps(H)
    training.refuses(training.takes()[0], "late")
    training.hears_news()
    training.steps(2)
    training.is_asked_for_newest()
    training.brings(1000, 1)
    return H + 2


def moved_when_it_came_back(training: ScriptedTraining) -> int:
    """Without a push: the broker went on while the connection was broken."""
    training.steps(2)
    training.broker.restart()
    training.broker.welcomes(version(1))
    training.broker.hears_pull()
    training.brings(1000, 1)
    return 2


@dataclass(frozen=True)
class Plot:
    """How the first push ends, and the results.

    Attributes:
        opens: makes the first push and its outcome.
        merged: the model at its next boundary, before that is merged.
        delta: the pseudo-gradient that is pushed there.
        last: the model three steps later, where the following version has 500.
        copies: how often tensors are copied into, where that is interrupted.
    """

    opens: Callable[[ScriptedTraining], int]
    merged: float
    delta: float
    last: float
    config: dict[str, Any] = field(default_factory=dict)
    copies: int = 0


ALPHA, HALF, ALL = ({"fragment_update_alpha": alpha} for alpha in (0.25, 0.5, 1.0))
REBASE = {"fragment_merge": "rebase"}
LATER = {"fragment_sync_delay": 2}
SOON = {"fragment_sync_delay": 1}
SLOW = SOON | {"fragment_max_delay": 4}
N = TENSORS
in_the_air = counted_after(H)
late = counted_after(H + 2)
given_up = counted_after_giving_up
PLOTS = {
    "plain": Plot(counted_at_the_boundary, 996, 4, 497, copies=N),
    # 0.5 * 96 + 0.5 * 1000, and four steps
    "alpha at once": Plot(counted_at_the_boundary, 544, 456, 519, HALF, N),
    "plain later": Plot(in_the_air, 998, 2, 499, LATER, N),
    "alpha": Plot(in_the_air, 0.25 * 94 + 750 - 2, 228.5, 566.375, LATER | ALPHA, N),
    "alpha 1": Plot(in_the_air, 92, 908, 89, LATER | ALL),
    "rebase": Plot(in_the_air, 1000 - 2 - 2, 4, 497, LATER | REBASE, N),
    "rebase takes no alpha": Plot(in_the_air, 996, 4, 497, LATER | REBASE | HALF),
    "slow": Plot(late, 999, 1, 498, SLOW),
    "slow alpha": Plot(late, 0.5 * 93 + 500 - 1, 454.5, 520.25, SLOW | HALF),
    "slow rebase": Plot(late, 1000 - 3 - 1, 4, 497, SLOW | REBASE),
    # given up at 96, or at 95 where the delay is 1; counted when the model is at 93
    "given up": Plot(given_up, 1000 - 3 - 1, 4, 497, {}, N),
    "given up alpha": Plot(given_up, 0.5 * 95 + 500 - 2 - 1, 455.5, 519.75, SOON | HALF, N),
    "given up alpha 1": Plot(given_up, 92, 908, 89, SOON | ALL),
    "given up rebase": Plot(given_up, 996, 4, 497, REBASE, N),
    "given up rebase later": Plot(given_up, 996, 4, 497, SOON | REBASE),
    "refused": Plot(refused_at_the_boundary, 96, 4, 497, {}, N),
    "refused later": Plot(refused_in_the_air, 96, 4, 499, LATER, N),
    "refused rebase": Plot(refused_in_the_air, 96, 4, 497, LATER | REBASE, N),
    "dropped": Plot(dropped_as_late, 996, 4, 499, LATER, 2 * N),
    "dropped rebase": Plot(dropped_as_late, 996, 4, 497, LATER | REBASE),
    "moved": Plot(moved_when_it_came_back, 996, 4, 497, {}, N),
}
ERRORS = [MemoryError, KeyboardInterrupt]
CASES: list[tuple[str, int | None, type[BaseException]]] = [
    *((name, None, MemoryError) for name in PLOTS),
    *(
        (name, nth, ERRORS[nth % 2])  # an error before a tensor is changed, Ctrl-C after it
        for name, plot in PLOTS.items()
        for nth in range(plot.copies)
    ),
]


@pytest.mark.parametrize(("name", "nth", "error"), CASES)
def test_interrupted_merge_is_resumed_and_counts_once(
    training: ScriptedTraining, name: str, nth: int | None, error: type[BaseException]
) -> None:
    plot = PLOTS[name]
    breaks = begins(training, plot.config, nth=nth, error=error)
    made = plot.opens(training)
    training.trains(H - made if made < H else 2 * H - made)
    push, delta = training.takes()
    assert (training.values, delta) == (plot.merged, plot.delta)
    if plot.config.get("fragment_sync_delay"):
        training.done()
        training.brings(500, 2, push)
    else:
        training.serves(500, 2, push)
        training.done()
    training.steps(H - 1)
    assert training.values == plot.last
    assert breaks.left is None or breaks.left < 0, "it was never interrupted"


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("nth", range(TENSORS))
def test_interrupted_load_is_resumed(
    training: ScriptedTraining, nth: int, error: type[BaseException]
) -> None:
    breaks = begins(training, LATER, nth=nth, error=error)
    training.steps(2)

    def loads() -> bool | None:
        try:
            with breaks:
                return training.worker.load_global()
        except KeyboardInterrupt:
            return None

    training.does(loads)
    training.broker.hears_pull()
    training.serves(1000, 1)
    assert not training.done()
    training.steps(1)
    assert training.values == 1000 - 1


def test_state_saved_amid_a_merge_has_no_parameters(
    training: ScriptedTraining, caplog: pytest.LogCaptureFixture
) -> None:
    """A part of the model is ahead of the rest, so they would belong to no moment."""
    begins(training, LATER, nth=2, error=KeyboardInterrupt)
    in_the_air(training)
    training.steps(2)
    assert training.metrics.unsynced_steps == H + 2
    assert training.worker.state_dict()["resume"] is None
    assert "save again" in caplog.text
    training.steps(1)
    assert training.worker.state_dict()["resume"] is not None
    assert training.metrics.unsynced_steps == 0


@pytest.mark.parametrize(
    ("opens", "nth", "ends_at"),
    [
        (in_the_air, 2, 1000),
        # Without a delta in flight.
        (dropped_as_late, TENSORS + 2, 1000 - 3),
    ],
)
def test_leaving_worker_first_finishes_an_interrupted_merge(
    training: ScriptedTraining, opens: Callable[[ScriptedTraining], int], nth: int, ends_at: float
) -> None:
    begins(training, LATER, nth=nth, error=KeyboardInterrupt)
    made = opens(training)
    training.steps(H + 2 - made or 1)
    assert len(values(training)) == 2, "inconsistent"
    training.worker.close()
    assert values(training) == {ends_at}
    assert training.worker.state_dict()["resume"] is not None


def test_push_that_is_offered_again_after_an_interrupt_is_sent_once(
    training: ScriptedTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    begins(training, LATER)
    offer = training.link.offer

    def interrupted_once(*arguments: Any) -> None:
        monkeypatch.setattr(training.link, "offer", offer)
        offer(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(training.link, "offer", interrupted_once)
    training.steps(H + 1)
    push, delta = training.takes()
    assert (push.steps, delta) == (H, H)
    training.broker.hears_nothing_of(Push, 0.1)
