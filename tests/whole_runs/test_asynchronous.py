"""Asynchronous runs over real sockets equal the formulas, with a scripted order and staleness.

One thread drives all workers, so that the order in which pseudo-gradients are applied is known.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.testing import assert_close

from diloco_broker import Broker
from diloco_worker import DiLoCoClient
from kit.reference import (
    DelayedNesterov,
    GlobalModel,
    Outcome,
    Plan,
    State,
    Trainee,
    asynchronous,
    difference,
    put,
    state_of,
)
from kit.whole_run import (
    PATIENCE_S,
    adamw,
    an_mlp,
    assert_same,
    check,
    hooked,
    joined,
    make_config,
    options_of,
    sgd,
    strided,
    trainee,
    trainees,
)

WORKERS = 3
# Who sends next: each is overtaken now and then, by up to four pseudo-gradients of the others.
ORDER = [0, 1, 2, 0, 0, 1, 0, 2, 0, 0, 1, 0, 2, 1, 1, 2]
LR, MU = 0.3, 0.6
RATES: dict[str, Any] = {"outer_lr": LR, "outer_momentum": MU}


def normed(workers: int) -> list[Trainee]:
    """With a BatchNorm: float buffers, of which each worker gives its share, and an integer."""
    made = []
    for worker in range(workers):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
        made.append(trainee(model, sgd(model), worker))
    return made


NORMED = [
    ["0.weight", "0.bias", "3.weight", "3.bias"],
    ["1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"],
]


def delayed(_: int) -> DelayedNesterov:
    return DelayedNesterov(LR, MU, WORKERS)


def test_fragments_have_a_buffer_and_a_staleness_each() -> None:
    """With `poly` a pseudo-gradient that is s versions old counts (1 + s)^-1/2.

    A worker trains, sends a fragment and pulls everything, again and again. After each pull the global
    parameters, their versions and the staleness shown are compared.
    """
    ours, twins = normed(WORKERS), normed(WORKERS)
    world = GlobalModel(twins[0].model, NORMED, delayed, share=1 / WORKERS)
    held = [list(world.versions) for _ in range(WORKERS)]
    pushes, ages = [0] * WORKERS, []
    weighted: dict[str, Any] = {"staleness_weight": "poly", **RATES}
    config = make_config(mode="async", workers=WORKERS, num_fragments=2, **weighted)
    with Broker(config) as broker, joined(broker, ours[0].model, WORKERS) as clients:
        for worker in ORDER:
            fragment = (pushes[worker] + worker) % 2  # each goes through the fragments from another
            pushes[worker] += 1
            deltas = []
            for each in (ours[worker], twins[worker]):
                start = state_of(each.model)
                each.step()
                each.step()
                deltas.append(difference({n: start[n] for n in NORMED[fragment]}, each.model))
            clients[worker].push(deltas[0], fragment=fragment)
            got = clients[worker].pull()
            put(ours[worker].model, got.tensors)

            age = world.versions[fragment] - held[worker][fragment]
            world.advance(fragment, deltas[1:], [1.0], (1 + age) ** -0.5)
            held[worker] = list(world.versions)
            put(twins[worker].model, world.values)

            assert_close(dict(got.tensors), world.values, rtol=1e-4, atol=1e-6)
            assert [each.counter for each in got.versions.values()] == world.versions
            shown = clients[worker].status()
            assert shown["last_round"]["staleness"] == age
            assert shown["workers"][worker]["id"] == f"w{worker}"
            assert shown["workers"][worker]["staleness"] == age
            assert [each["gradients"] for each in shown["fragments"]] == world.versions
            ages.append(age)
    assert max(ages) >= 2


def test_hooks_at_different_speeds_follow_the_formula_step_by_step() -> None:
    """tau = 0: a worker at a slot waits until its own work has been applied, and for no other worker."""
    pieces, alpha = 2, 0.25
    plan = Plan(3, strided(pieces), alpha=alpha)
    speeds = [0, 0, 1, 0, 2, 0, 0, 1]  # worker 0 is the fastest
    order = [speeds[i % len(speeds)] for i in range(8 * len(speeds))]
    config = make_config(mode="async", workers=WORKERS, **options_of(plan), **RATES)
    ours = trainees(WORKERS, adamw)
    histories: list[list[State]] = [[] for _ in ours]
    pushes: list[tuple[int, int, int]] = []
    with (
        Broker(config) as broker,
        DiLoCoClient(broker.address, timeout=PATIENCE_S) as observer,
        hooked(broker, ours) as hooks,
    ):
        versions = [0] * pieces
        for worker in order:
            ours[worker].step()
            histories[worker].append(state_of(ours[worker].model))
            shown = [each["version"] for each in observer.status()["fragments"]]
            for fragment in range(pieces):
                if shown[fragment] > versions[fragment]:
                    pushes.append((worker, fragment, hooks[worker].sync_metrics.staleness))
            versions = shown
        got = Outcome(histories, observer.pull().tensors)
        rounds = [hook.sync_metrics.pushes for hook in hooks]
    # The broker says which fragment each begins with.
    begins = [next(f for w, f, _ in pushes if w == worker) for worker in range(WORKERS)]
    wanted, sent = asynchronous(trainees(WORKERS, adamw), order, plan, delayed, begins)
    assert pushes == sent
    assert rounds == [sum(w == worker for w, _, _ in sent) for worker in range(WORKERS)]
    assert max(staleness for _, _, staleness in sent) >= 3
    assert_same(got, wanted, rtol=1e-4)


def test_one_asynchronous_worker_is_a_synchronous_one() -> None:
    """N = 1, so Delayed Nesterov is Nesterov; fragments, tau and alpha as in rounds."""
    plan = Plan(7, strided(3), delay=1, alpha=0.25)
    make = partial(an_mlp, make_optimizer=adamw)
    check(plan, make, workers=1, steps=23, exact=False, config={"mode": "async"})
