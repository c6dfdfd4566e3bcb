"""Outer optimizers against the same in plain torch, over several chunks and fragments."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import cycle, product
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco_broker.config.schedule import OuterSchedule, Schedule
from diloco_broker.core.events import Stepped
from diloco_broker.tensors.outer.chunked import Buffered, DelayedNesterov, Nesterov
from diloco_broker.tensors.outer.make import Outer
from diloco_broker.tensors.outer.torch_optim import TorchOuter
from diloco_broker.tensors.parameters import FragmentTensors
from kit.chunked_model import ChunkedModel, fold, read, same, wire
from kit.outers import BUFFERED, CASES, ETA, EVERY, MU, N, sgd


def paired(names: Iterable[Any], values: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Each name with one of the values, in turn."""
    return list(zip(names, cycle(values), strict=False))


@pytest.mark.parametrize(("fragments", "chunk_elements"), [(2, 1), (1, 4), (2, 7), (1, 64)])
@pytest.mark.parametrize("name", CASES)
def test_optimizer_equals_its_formula(name: str, fragments: int, chunk_elements: int) -> None:
    case = CASES[name]
    model = ChunkedModel(case.outer, fragments=fragments, chunk_elements=chunk_elements)
    tolerance = 0.0 if case.is_exact else 2e-5
    for fragment, start in enumerate(model.start):
        values, reference = model.named(fragment, start), case.reference()
        for _ in range(3 * N + 1):
            gradient = torch.randn_like(start)
            assert not any(done.overflow for done in model.merges(gradient, fragment=fragment))
            values = reference(values, model.named(fragment, gradient))
            flat = torch.cat([each.reshape(-1) for each in values.values()])
            torch.testing.assert_close(model.theta(fragment), flat, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", EVERY)
def test_streamed_and_staged_steps_are_the_same(name: str) -> None:
    streamed, staged = ChunkedModel(EVERY[name]), ChunkedModel(EVERY[name])
    staged.place(0, streamed.start[0])
    for _ in range(2 * N + 1):
        gradient = torch.randn_like(streamed.start[0])
        chunks = [streamed.steps(gradient), staged.merges(gradient)]
        assert [bytes(one.wire) for one in chunks[0]] == [bytes(one.wire) for one in chunks[1]]
    assert not torch.equal(streamed.theta(), streamed.start[0])


@pytest.mark.parametrize(("name", "reply"), paired(EVERY, ["fp32", "bf16"]))
def test_what_was_handed_out_or_is_being_saved_never_changes(name: str, reply: str) -> None:
    model = ChunkedModel(EVERY[name], reply=reply)
    saved: list[tuple[FragmentTensors, FragmentTensors]] = []
    for _ in range(2 * N + 1):
        model.merges(torch.randn_like(model.start[0]))
        saved.append((model.tensors.fragment_tensors(0), model.memory()))
        wires = [bytes(chunk) for chunk in model.handed_out]
        model.steps(torch.randn_like(model.start[0]))
        assert all(same(now, before) for now, before in saved)
        assert [bytes(chunk) for chunk in model.handed_out][: len(wires)] == wires


ENORMOUS = {"inf": float("inf"), "nan": float("nan"), "largest": 3e38}


@pytest.mark.parametrize("kind", ENORMOUS)
@pytest.mark.parametrize("name", EVERY)
def test_step_that_is_not_finite_leaves_no_trace(name: str, kind: str) -> None:
    """Before each gradient that no buffer is due at, one that cannot be used comes in; a twin never
    sees those."""
    model, twin = (ChunkedModel(EVERY[name], reply="fp16") for _ in range(2))
    twin.place(0, model.start[0])
    for count in range(2 * N + 1):
        gradient = torch.randn_like(model.start[0])
        poison = gradient.clone()
        poison[5] = ENORMOUS[kind]  # in the second of the chunks
        # An enormous value fits a buffer that is only filled; what it leads to overflows later.
        is_only_kept = "fedbuff" in name and (count + 1) % N and kind == "largest"
        is_due = name in BUFFERED and (count + 1) % N == 0
        if not is_only_kept and not is_due:
            before = model.memory()
            done = model.merges(poison, lacks=[0, 2, 3, 4, 5, 6, 7, 8, 9], count=count)
            assert [one.index for one in done if one.overflow] == [1]
            assert same(model.memory(), before)
        wires = [[one.wire for one in each.merges(gradient)] for each in (model, twin)]
        assert [bytes(w) for w in wires[0]] == [bytes(w) for w in wires[1]]
    assert same(model.memory(), twin.memory())


@pytest.mark.parametrize("name", ["fedbuff", "direct", "dn", "torch-fedbuff"])
def test_sum_that_overflows_leaves_the_buffer_as_it_was(name: str) -> None:
    outers: dict[str, Outer] = {
        "fedbuff": Buffered(Nesterov(1e-20, MU), N),
        "direct": Buffered(Nesterov(1e-20, MU), N, is_direct=True),
        "dn": DelayedNesterov(1e-20, MU, N),
        "torch-fedbuff": TorchOuter(lambda p: torch.optim.SGD(p, lr=1e-20), N),
    }
    model = ChunkedModel(outers[name])
    large = torch.full_like(model.start[0], 3e38)
    assert not any(done.overflow for done in model.merges(large))
    before = model.memory()
    assert all(done.overflow for done in model.merges(large))
    assert same(model.memory(), before)


@pytest.mark.parametrize(
    ("case", "turn"), paired(product(BUFFERED, [*ENORMOUS, "absent"]), range(N)), ids=str
)
def test_boundary_without_a_usable_gradient_has_zeros(case: tuple[str, str], turn: int) -> None:
    """In three buffers running the gradient of one turn cannot be used; a twin has zeros at a boundary
    and nothing between them."""
    name, kind = case
    model, twin = (ChunkedModel(EVERY[name], reply="fp16") for _ in range(2))
    twin.place(0, model.start[0])
    if "fedbuff" in name and turn < N - 1 and kind == "largest":
        return  # it fits the buffer; see the test of buffers that are thrown away
    for count in range(3 * N):
        gradient = torch.randn_like(model.start[0])
        if count % N != turn:
            done = model.merges(gradient)
            assert not any(one.overflow for one in done)
            twin.merges(gradient)
        else:
            poison = None if kind == "absent" else torch.full_like(gradient, ENORMOUS[kind])
            done = model.merges(poison)
            assert all(one.overflow == (kind != "absent") for one in done)
            twin.merges(torch.zeros_like(gradient) if turn == N - 1 else None)
        assert same(model.memory(), twin.memory())
        theta = torch.cat([read(one, torch.float16) for one in model.handed_out[-len(done) :]])
        assert torch.equal(theta, model.theta().half()), "what is handed out is what is kept"


@pytest.mark.parametrize(("name", "streamed"), paired(BUFFERED, [True, False]))
def test_missing_chunk_at_a_boundary_applies_its_buffer(name: str, streamed: bool) -> None:
    model, twin = (ChunkedModel(EVERY[name]) for _ in range(2))
    twin.place(0, model.start[0])
    for count in range(3 * N):
        gradient = torch.randn_like(model.start[0])
        is_due = (count + 1) % N == 0
        if not is_due:
            model.merges(gradient)
        elif streamed:
            steps_lacking_one(model, gradient, count)
        else:
            model.merges(gradient, lacks=[1], count=count)
        gradient[4:8] *= not is_due
        twin.merges(gradient, count=count)
        model.counts[0] = count + 1
        assert same(model.memory(), twin.memory())


@pytest.mark.parametrize("kind", ["usable", "nan", "absent"])
@pytest.mark.parametrize("name", ["dn", "direct", "fedbuff", "torch-fedbuff"])
def test_overflowing_buffer_is_dropped_and_momentum_kept(name: str, kind: str) -> None:
    outers = EVERY | {"torch-fedbuff": TorchOuter(sgd, N)}
    model = ChunkedModel(outers[name], reply="fp16")
    model.place(0, torch.full_like(model.start[0], 6e4))
    for _ in range(N):
        model.merges(torch.ones_like(model.start[0]))
    momentum = replace(model.memory(), chunks=[])
    assert "delayed" not in momentum.outer
    for _ in range(N - 1):  # what fits as it comes and, with the momentum, not in the end
        large = torch.full_like(model.start[0], 8e4 if "direct" in name else 2e5)
        assert not any(done.overflow for done in model.merges(large))
    theta = model.theta()
    last = {"usable": torch.ones_like(theta), "nan": theta * float("nan"), "absent": None}[kind]
    assert all(done.overflow for done in model.merges(last)), "it is never lost silently"
    assert torch.equal(model.theta(), theta)
    assert same(replace(model.memory(), chunks=[]), momentum)


@pytest.mark.parametrize("name", EVERY)
def test_several_groups_are_applied_one_after_the_other(name: str) -> None:
    together, alone = ChunkedModel(EVERY[name]), ChunkedModel(EVERY[name])
    together.place(0, alone.start[0])
    for groups in (2, 1, 4):
        gradients = [torch.randn_like(alone.start[0]) for _ in range(groups)]
        together.merges(*gradients)
        for gradient in gradients:
            alone.merges(gradient)
    assert same(together.memory(), alone.memory())


@pytest.mark.parametrize("name", EVERY)
def test_empty_group_takes_no_step_and_counts_all_the_same(name: str) -> None:
    model, twin = ChunkedModel(EVERY[name]), ChunkedModel(EVERY[name])
    twin.place(0, model.start[0])
    first, second = torch.randn(2, model.elements(0))
    model.merges(first, None)
    model.merges(None, None, second, None)
    twin.merges(first, count=0)
    if name in BUFFERED:
        twin.merges(torch.zeros_like(first), count=2)  # the buffer is due whatever comes
    twin.merges(second, count=4)
    if name in BUFFERED:
        twin.merges(torch.zeros_like(first), count=5)
    assert same(model.memory(), twin.memory())
    before = model.memory()
    assert not any(done.overflow for done in model.merges(*[None] * 2 * N))
    assert same(model.memory(), before), "no buffer, no step, at boundaries too"


def steps_lacking_one(model: ChunkedModel, gradient: Tensor, count: int) -> list[Stepped]:
    """A streamed step in which no worker delivered chunk 1."""
    done = []
    for span in model.spans(0):
        if span.index != 1:
            fold(model.tensors, 0, span.index, wire(gradient[span.start : span.stop]), 1.0)
        done += model.tensors.step(0, span.index, float(span.index != 1), count)()
    assert len(done) == len(model.spans(0))
    return done


@pytest.mark.parametrize(("name", "streamed"), paired(EVERY, [True, False]))
def test_missing_chunk_keeps_its_value(name: str, streamed: bool) -> None:
    model = ChunkedModel(EVERY[name])
    for _ in range(N):
        model.merges(torch.randn_like(model.start[0]))
    before = model.theta()
    for count in range(N, 2 * N):
        gradient = torch.randn_like(before)
        if streamed:
            done = steps_lacking_one(model, gradient, count)
        else:
            done = model.merges(gradient, lacks=[1], count=count)
        assert not any(one.overflow for one in done)
        assert torch.equal(model.theta()[4:8], before[4:8])
    assert not torch.equal(model.theta()[:4], before[:4])
    model.merges(torch.randn_like(before), count=2 * N - 1)
    assert not torch.equal(model.theta()[4:8], before[4:8])


@pytest.mark.parametrize("name", EVERY)
def test_training_goes_on_from_what_was_exported(name: str) -> None:
    model = ChunkedModel(EVERY[name], fragments=2)
    for _ in range(N + 1):
        for fragment, start in enumerate(model.start):
            model.merges(torch.randn_like(start), fragment=fragment)
    again = ChunkedModel(EVERY[name], fragments=2)
    for fragment in range(2):
        again.tensors.put_back(fragment, model.memory(fragment))
        again.counts[fragment] = model.counts[fragment]
    for _ in range(N + 1):
        for fragment, start in enumerate(model.start):
            gradient = torch.randn_like(start)
            model.merges(gradient, fragment=fragment)
            again.merges(gradient, fragment=fragment)
    for fragment in range(2):
        assert same(again.memory(fragment), model.memory(fragment))


# Steps under schedules, beside an optimizer that is given the rates of each step.

# Written down, not asked of the product: within 8 gradients eta falls to a quarter of it, and mu rises.
FALLING = [1 - 0.75 * min(count, 8) / 8 for count in range(9)]
FROM_HALF = [0.5 + 0.4 * min(count, 4) / 4 for count in range(9)]
# Without any momentum an optimizer at constant rates would not begin to collect it.
FROM_ZERO = [max(1e-30, 0.9 * min(count, 4) / 4) for count in range(9)]
LR = Schedule.parse("linear:8:0.25")
WARMUPS = {"constant": [MU] * 9, "linear:4:0.5": FROM_HALF, "linear:4": FROM_ZERO}


def at_rates(outer: Outer, factor: float, momentum: float) -> Outer:
    """This optimizer at constant rates; those of a factory's are in its groups."""
    if isinstance(outer, TorchOuter):
        return outer
    if isinstance(outer, Buffered):
        inner = replace(outer.inner, lr=outer.inner.lr * factor, momentum=momentum)
        return replace(outer, inner=inner)
    assert isinstance(outer, Nesterov | DelayedNesterov)
    return replace(outer, lr=outer.lr * factor, momentum=momentum if outer.momentum else 0.0)


@pytest.mark.parametrize(
    ("name", "warmup"),
    [
        *(("nesterov", each) for each in WARMUPS),
        *(("classical", "linear:4:0.5"), ("sgd", "constant"), ("fedbuff", "linear:4")),
        *(("direct", "linear:4:0.5"), ("dn", "linear:4:0.5"), ("dn-c", "linear:4")),
        ("torch", "constant"),
    ],
)
def test_each_step_has_the_rates_that_its_fragment_s_count_says(name: str, warmup: str) -> None:
    outer, schedule = EVERY[name], OuterSchedule(LR, Schedule.parse(warmup))
    model = ChunkedModel(outer, fragments=2, schedule=schedule)
    twin = ChunkedModel(outer, fragments=2)
    for fragment, start in enumerate(model.start):
        twin.place(fragment, start)
    # The fragments take turns that are not equal: each counts its own.
    for fragment in [count % 3 % 2 for count in range(13)]:
        count = model.counts[fragment]
        now = at_rates(outer, FALLING[count], WARMUPS[warmup][count])
        twin.tensors.tune(now, 1.0, {"lr": 0.1 * FALLING[count]})  # that of `adamw`
        gradient = torch.randn_like(model.start[fragment])
        model.merges(gradient, fragment=fragment)
        twin.merges(gradient, fragment=fragment)
        found, wanted = model.theta(fragment), twin.theta(fragment)
        torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)


RESTARTED = ("nesterov", "classical", "dn", "dn-c", "direct", "fedbuff")


@pytest.mark.parametrize("name", RESTARTED)
def test_restart_of_the_momentum_equals_a_new_optimizer(name: str) -> None:
    """Also after a resumption from a checkpoint: only the count of the fragment's gradients decides."""
    case, rounds = CASES[name], 2
    size = case.outer.size
    schedule = OuterSchedule(size=size, restart=rounds)
    model = ChunkedModel(case.outer, fragments=2, schedule=schedule)
    theta, references = list(model.start), [case.reference() for _ in range(2)]
    for count in range(3 * rounds * size + 1):
        if count == rounds * size + 1:  # just after the restart
            kept, counts = [model.memory(fragment) for fragment in range(2)], model.counts
            model = ChunkedModel(case.outer, fragments=2, schedule=schedule)
            model.counts = counts
            for fragment, each in enumerate(kept):
                model.tensors.put_back(fragment, each)
        for fragment in range(2):
            if count and count % (rounds * size) == 0:
                references[fragment] = case.reference()
            gradient = torch.randn_like(theta[fragment])
            model.merges(gradient, fragment=fragment)
            theta[fragment] = references[fragment]({"": theta[fragment]}, {"": gradient})[""]
            error = 0.0 if case.is_exact else 2e-5
            torch.testing.assert_close(
                model.theta(fragment), theta[fragment], rtol=error, atol=error
            )


def test_momentum_restarts_in_a_round_without_a_usable_gradient() -> None:
    model = ChunkedModel(Nesterov(ETA, MU), schedule=OuterSchedule(restart=2))
    first, second, last = (torch.randn_like(model.start[0]) for _ in range(3))
    model.merges(first, second, None)  # the restart is due in the third
    before = model.theta()
    model.merges(last)
    fresh = CASES["nesterov"].reference()({"": before}, {"": last})[""]
    torch.testing.assert_close(model.theta(), fresh, rtol=0.0, atol=0.0)


def test_factory_s_groups_keep_the_rate_that_is_their_own() -> None:
    """`set` changes it and a checkpoint keeps it; a scheduler within the step may change it."""

    class Halving(torch.optim.SGD):
        def step(self, *arguments: Any) -> Any:
            super().step(*arguments)
            self.param_groups[0]["lr"] /= 2

    for make, wanted in ((sgd, ETA), (lambda p: Halving(p, lr=ETA), ETA / 8)):
        model = ChunkedModel(TorchOuter(make), schedule=OuterSchedule(LR))
        for _ in range(3):
            model.merges(torch.randn_like(model.start[0]))
        (group,) = model.tensors.outer_groups()
        assert group.lr == pytest.approx(wanted, rel=1e-12)
