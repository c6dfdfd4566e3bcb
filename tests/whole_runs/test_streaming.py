"""Synchronous runs over real sockets equal the single-process loop: with fragments, delays and merges.

In deterministic mode with an fp32 wire every bit agrees; the mean that takes chunks as they come agrees
within fp32 rounding. See `reference.py` for the loop and `whole_run.py` for the run.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from diloco_broker import Broker
from diloco_protocol.fragments import slots
from diloco_worker import DiLoCoWorker
from kit.reference import Plan, Trainee, nesterov, state_of, streaming
from kit.uniform_model import until
from kit.whole_run import (
    adamw,
    an_mlp,
    assert_same,
    check,
    joined,
    make_config,
    options_of,
    run,
    strided,
    trainees,
)

# H for each P: not divisible by P, and floor(H / P) > tau for every tau tried.
STEPS = {1: 4, 2: 7, 3: 10}


def with_adamw(worker: int) -> Trainee:
    return an_mlp(worker, adamw)


# Each pair of number of fragments, delay and merge; and local values that are all kept.
GRID = [
    ((delay + kind) % 3 + 1, delay, alpha)
    for delay in range(3)
    for kind, alpha in enumerate((0.0, 0.25, None))
] + [(2, 1, 1.0)]


@pytest.mark.parametrize(("pieces", "delay", "alpha"), GRID)
def test_deterministic_run_equals_the_loop_bit_for_bit(
    pieces: int, delay: int, alpha: float | None
) -> None:
    check(Plan(STEPS[pieces], strided(pieces), delay, alpha), with_adamw)


@pytest.mark.parametrize(
    ("h", "pieces", "delay", "alpha", "is_exact"),
    [(3, 3, 0, 0.5, True), (10, 3, 2, None, False)],
)
def test_run_of_three_workers_equals_the_loop(
    h: int, pieces: int, delay: int, alpha: float | None, is_exact: bool
) -> None:
    """Bit for bit, and within rounding where chunks are added up as they come."""
    check(Plan(h, strided(pieces), delay, alpha), workers=3, exact=is_exact)


def test_restored_local_step_shifts_the_schedule() -> None:
    """With `local_step` = tau = 1 each fragment is sent tau steps earlier: torchft's timing."""
    origin = 1
    plan = Plan(7, strided(3), delay=1, alpha=0.25, origin=origin)
    check(plan, restored={"local_step": origin})


def test_all_fragments_at_one_step_are_the_whole_model() -> None:
    """tau = 0, alpha = 0: the outer optimizer goes element by element, so the split changes nothing."""
    every, steps = 3, 12

    def at_once(hook: DiLoCoWorker, worker: int, step: int) -> None:
        if (step + 1) % every == 0:
            hook.force_sync()

    config = make_config(workers=2, deterministic=True, sync_every=100, num_fragments=3)
    with Broker(config) as broker:
        got = run(broker, trainees(2), steps, after=at_once)
    assert_same(got, streaming(trainees(2), steps, Plan(every, strided(1))), exact=True)


def test_cycle_begins_anew_where_all_fragments_were_synchronised() -> None:
    forced = 6  # slots are after steps 2, 4 and 7; nothing is under way here
    plan = Plan(7, strided(3), delay=1, alpha=0.25, forced=(forced,))

    def once(hook: DiLoCoWorker, worker: int, step: int) -> None:
        if step + 1 == forced:
            hook.force_sync()

    check(plan, steps=21, after=once)


@pytest.mark.parametrize(("mode", "outer"), [("sync", "nesterov"), ("async", "dn")])
def test_one_worker_with_every_step_taken_over_is_the_plain_inner_optimizer(
    mode: str, outer: str
) -> None:
    """H = 1, eta = 1, mu = 0: theta - (theta - theta_1) is what the inner step made of it."""
    options: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0, "sync_every": 1}
    with Broker(make_config(mode=mode, outer=outer, **options)) as broker:
        got = run(broker, trainees(1, adamw), 12)
    plain = trainees(1, adamw)[0]
    for ours in got.histories[0]:
        plain.step()
        for name, tensor in state_of(plain.model).items():
            torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-6)


def test_contributions_weigh_by_what_was_reported_since_the_fragment_was_sent_last() -> None:
    weight_by = "tokens"

    def amount(worker: int, step: int) -> int:
        return (7 * step + 5 * worker) % 11 + 1 + 20 * worker

    def report(hook: DiLoCoWorker, worker: int, step: int) -> None:
        hook.report(**{weight_by: amount(worker, step)})

    plan = Plan(5, strided(2), delay=1)
    config = make_config(workers=3, deterministic=True, weight_by=weight_by, **options_of(plan))
    with Broker(config) as broker:
        got = run(broker, trainees(3), 17, before=report)
    wanted = streaming(trainees(3), 17, plan, report=amount)
    assert_same(got, wanted, exact=True)
    equal = streaming(trainees(3), 17, plan)
    with pytest.raises(AssertionError):  # the weights do make a difference
        assert_same(got, equal)


def test_order_of_arrival_changes_no_bit_of_a_deterministic_run() -> None:
    """Each round the pushes come in another order; sums of numbers so unlike depend on it."""
    pieces = 2
    plan = Plan(2, strided(pieces))
    orders = list(itertools.permutations(range(3)))
    config = make_config(workers=3, deterministic=True, outer_lr=1e-3, **options_of(plan))
    first = trainees(1)[0].model
    noise = torch.Generator().manual_seed(3)
    magnitudes = [1e4, 1.0, 1e-3]
    deltas = [
        {
            name: size * torch.randn(tensor.shape, generator=noise)
            for name, tensor in state_of(first).items()
        }
        for size in magnitudes
    ]
    outers = [nesterov(1e-3)(fragment) for fragment in range(pieces)]
    values = state_of(first)
    with Broker(config) as broker, joined(broker, first, 3) as clients:
        for order, fragment in itertools.product(orders, range(pieces)):
            names = plan.fragments[fragment]
            for worker in order:
                part = {name: deltas[worker][name] for name in names}
                clients[worker].push(part, fragment=fragment)
            mean = {n: (deltas[0][n] + deltas[1][n] + deltas[2][n]) / 3 for n in names}
            values |= outers[fragment]({n: values[n] for n in names}, mean)
            for client in clients:
                got = client.pull().tensors
                assert all(torch.equal(got[name], values[name]) for name in names), order
    backwards = {n: (deltas[2][n] + deltas[1][n] + deltas[0][n]) / 3 for n in names}
    assert any(not torch.equal(backwards[name], mean[name]) for name in names)


def test_one_of_five_that_shouts_counts_no_more_than_the_median() -> None:
    """`clip-median-norm`: d min(1, median |d| / |d|), |d| over the whole fragment."""
    first = trainees(1)[0].model
    noise = torch.Generator().manual_seed(4)
    deltas = [
        {
            name: (0.5 + worker) * torch.randn(tensor.shape, generator=noise)
            for name, tensor in state_of(first).items()
        }
        for worker in range(5)
    ]
    deltas[3] = {name: 100 * delta for name, delta in deltas[3].items()}
    vectors = [
        torch.cat([d.flatten() for d in delta.values()]).double().numpy() for delta in deltas
    ]
    norms = np.array([np.linalg.norm(vector) for vector in vectors])
    factors = np.minimum(1, np.median(norms) / norms)
    mean = sum(f * vector for f, vector in zip(factors, vectors, strict=True)) / 5
    config = make_config(workers=5, aggregate="clip-median-norm", outer_lr=0.5, outer_momentum=0.0)
    with Broker(config) as broker, joined(broker, first, 5) as clients:
        for client, delta in zip(clients, deltas, strict=True):
            client.push(delta)
        got = clients[0].pull().tensors
    flat = torch.cat([got[name].flatten() for name in deltas[0]]).double().numpy()
    start = torch.cat([t.flatten() for t in state_of(first).values()]).double().numpy()
    np.testing.assert_allclose(flat, start - 0.5 * mean, rtol=1e-5, atol=1e-5)
    assert np.linalg.norm(flat - start) < 10 < np.linalg.norm(vectors[3])


@pytest.mark.parametrize(("pieces", "alpha"), [(2, 0.0), (3, None)])
def test_on_a_fast_network_fragments_are_merged_one_step_after_their_slot(
    pieces: int, alpha: float | None
) -> None:
    """By default a reply is merged when it is here: before the next step, that is tau = 1."""
    plan = Plan(STEPS[pieces], strided(pieces), delay=1, alpha=alpha)
    options = options_of(plan)
    del options["fragment_sync_delay"]
    sent_at = slots(plan.sync_every, pieces)

    def reply_is_here(hook: DiLoCoWorker, _: int, step: int) -> None:
        cycle, position = divmod(step, plan.sync_every)
        sent = cycle * pieces + sum(slot <= position for slot in sent_at)
        until(lambda: hook.sync_count == sent or (hook._link is not None and hook._link.has_news))

    steps = 3 * plan.sync_every + 2
    with Broker(make_config(workers=2, **options)) as broker:
        got = run(broker, trainees(2), steps, before=reply_is_here, done=merged_after_one_step)
    assert_same(got, streaming(trainees(2), steps, plan))


def merged_after_one_step(hook: DiLoCoWorker, _: int, __: int) -> None:
    metrics = hook.sync_metrics
    assert (metrics.merge_delay, metrics.late_merges) == (1, 0)
