"""Models in bf16, fp16, fp32 and fp64: what training has not done is never sent, and what it has is.

A version is fp32. A model in a narrower dtype holds it rounded, and training begins there.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from diloco_broker import Broker
from diloco_protocol import Segment
from diloco_protocol.chunks import FragmentLayout
from diloco_protocol.messages import Error, Push
from diloco_worker import DiLoCoWorker
from diloco_worker.model.flat_state import FlatState
from kit.reference import Trainee
from kit.scripted_broker import Beside, Descent, ScriptedBroker, changed, run_config, version
from kit.uniform_model import Make, until
from kit.whole_run import make_config, run

pytest_plugins = ("kit.worker_fixtures",)

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
MERGES: list[dict[str, Any]] = [
    {},
    {"fragment_sync_delay": 1},
    {"fragment_sync_delay": 1, "fragment_merge": "rebase"},
    {"fragment_update_alpha": 0.5},
    {"fragment_sync_delay": 1, "fragment_update_alpha": 0.6},
]


def still(dtype: torch.dtype, layers: int = 2) -> nn.Module:
    return nn.Sequential(*(nn.Linear(4, 4, dtype=dtype) for _ in range(layers)))


def stand_still(descent: Descent, steps: int) -> None:
    """Steps of learning rate 0."""
    for group in descent.optimizer.param_groups:
        group["lr"] = 0.0
    descent.steps(steps)


def odd(state: FlatState, seed: int) -> FlatState:
    """Values of every size that no narrow dtype holds as they are."""
    generator = torch.Generator().manual_seed(seed)
    return changed(state, lambda vector: 3 * torch.randn(vector.shape, generator=generator))


def is_zero(delta: FlatState) -> bool:
    return not bool(delta.vectors[Segment.PARAMETERS].any())


def begun(
    broker: ScriptedBroker, beside: Beside, make: Make, model: nn.Module
) -> tuple[DiLoCoWorker, Descent]:
    """A worker that has joined a run whose parameters are odd."""
    worker, descent = make(model)
    started = beside(worker.start)
    broker.welcomes(version(0))
    assert broker.layout is not None
    for part in broker.layout.fragments:
        broker.serves(odd(descent.values(part=part), part.fragment), version(0))
    started()
    return worker, descent


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("merge", MERGES, ids=str)
def test_learning_rate_0_sends_exactly_0(
    broker: ScriptedBroker,
    beside: Beside,
    make: Make,
    merge: dict[str, Any],
    pieces: int,
    dtype: torch.dtype,
) -> None:
    """Each round brings new parameters; with alpha, which keeps a part of the old ones, the same."""
    broker.config = run_config(sync_every=4, num_fragments=pieces, **merge)
    worker, descent = begun(broker, beside, make, still(dtype))
    assert broker.layout is not None
    is_mixed = "fragment_update_alpha" in merge
    for round_ in range(5 * pieces):
        fragment, number = round_ % pieces, round_ // pieces + 1
        steps = beside(stand_still, descent, 4 // pieces)
        push, delta = broker.takes_push(round_)
        assert is_zero(delta)
        assert push.norm == 0
        part = descent.values(part=broker.layout.all[fragment])
        new = odd(part, fragment if is_mixed else 10 + round_)
        broker.serves(new, version(number), push.push_id)
        if merge.get("fragment_sync_delay"):
            until(lambda: bool(worker._link and worker._link.has_news))
        steps()
    assert "all zeros" in str(worker.sync_metrics.last_error)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("code", ["late", "bad_push"])
def test_dropped_push_leaves_no_rounding_behind(
    broker: ScriptedBroker, beside: Beside, make: Make, dtype: torch.dtype, code: str
) -> None:
    """The model is moved onto the newest parameters, or back to its base, with a step made since."""
    broker.config = run_config(sync_every=4, fragment_sync_delay=2)
    worker, descent = begun(broker, beside, make, still(dtype))
    stand_still(descent, 4)
    push = broker.hears(Push)
    broker.says(Error(code, "No.", push_id=push.push_id))
    until(lambda: bool(worker._link and worker._link.rejections))
    stand_still(descent, 1)
    if code == "late":
        broker.hears_pull()
        broker.serves(odd(descent.values(part=push_part(broker)), 10), version(1))
        until(lambda: bool(worker._link and worker._link.arrivals))
    steps = beside(stand_still, descent, 3)
    _, delta = broker.takes_push()
    assert is_zero(delta)
    steps()


def push_part(broker: ScriptedBroker) -> FragmentLayout:
    assert broker.layout is not None
    return broker.layout.fragments[0]


class Nudge(nn.Module):
    """One value, at 1."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.ones(8, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("merge", ["alpha", "rebase"])
def test_progress_of_less_than_half_an_ulp_adds_up_in_the_global_parameters(
    dtype: torch.dtype, merge: str
) -> None:
    """In each round one of four workers moves by an ulp of bf16: a quarter of one for all of them."""
    ulp, rounds = 2.0**-7, 40

    def trainee(worker: int) -> Trainee:
        model, number = Nudge(dtype), 0
        optimizer = SGD(model.parameters(), lr=1.0)

        def step() -> None:
            nonlocal number
            moves = number % 4 == worker
            model.value.grad = torch.full_like(model.value, -ulp if moves else 0.0)
            number += 1
            optimizer.step()

        return Trainee(model, optimizer, step)

    config = make_config(
        workers=4, sync_every=1, outer_lr=1.0, outer_momentum=0.0, fragment_merge=merge
    )
    with Broker(config) as broker:
        got = run(broker, [trainee(worker) for worker in range(4)], rounds)
    assert torch.equal(got.final["value"], torch.full((8,), 1 + rounds * ulp / 4))
