"""Every float buffer of a version lies between the least and the greatest value that went into it.

BatchNorm's variance is the reason: below zero it makes NaN of every evaluation.
"""

from collections.abc import Sequence

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from diloco_broker.tensors.outer.chunked import Nesterov
from diloco_broker.tensors.parameters import Parameters
from diloco_protocol import Kind, Manifest, TensorEntry, lay_out
from diloco_protocol.chunks import Segment
from diloco_worker.model.flat_state import FlatState
from diloco_worker.model.merging import Change
from diloco_worker.model.model_tensors import ModelTensors
from kit.chunked_model import a_part, fold, read, wire

MANIFEST = Manifest(
    (
        TensorEntry("weight", (1,), "float32", Kind.TRAINABLE),
        TensorEntry("variance", (3,), "float32", Kind.BUFFER),
    )
)
BUFFERS = 1  # the chunk of them

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
values = st.lists(floats, min_size=3, max_size=3).map(torch.tensor)
weights = st.floats(min_value=1e-300, max_value=1e12)
scales = st.floats(min_value=1e-3, max_value=1.0)
shares = st.integers(min_value=1, max_value=100).map(lambda workers: 1 / workers)


def the_tensors(old: Tensor, share: float = 1.0) -> Parameters:
    tensors = Parameters(
        lay_out(MANIFEST), Nesterov(0.7, 0.9), wire="bf16", reply="bf16", share=share
    )
    tensors.place(0, BUFFERS, wire(old))
    return tensors


def assert_between(got: Tensor, among: Sequence[Tensor]) -> None:
    stack = torch.stack(list(among))
    assert (stack.min(0).values <= got).all(), f"{got} is below all of {among}"
    assert (got <= stack.max(0).values).all(), f"{got} is above all of {among}"


def several(vectors: list[Tensor]) -> st.SearchStrategy[list[tuple[Tensor, float, float]]]:
    """Contributions of a few vectors: of equal ones any rounding that is not undone shows."""
    one = st.tuples(st.sampled_from(vectors), weights, scales)
    return st.lists(one, min_size=1, max_size=5)


pools = st.lists(values, min_size=1, max_size=2)
Sent = list[tuple[Tensor, float, float]]


@given(old=values, sent=pools.flatmap(several))
def test_mean_of_a_round_stays_in_the_range_of_its_contributions(old: Tensor, sent: Sent) -> None:
    tensors = the_tensors(old)
    for each, weight, _ in sent:
        assert fold(tensors, 0, BUFFERS, wire(each), weight) is not None
    (done,) = tensors.step(0, BUFFERS, sum(weight for _, weight, _ in sent), 0)()
    assert_between(read(done.wire), [each for each, _, _ in sent])


@given(
    old_and_groups=pools.flatmap(
        lambda each: st.tuples(st.sampled_from(each), st.lists(several(each), max_size=3))
    ),
    share=shares,
)
def test_submissions_move_a_buffer_no_further_than_to_what_was_sent(
    old_and_groups: tuple[Tensor, list[Sent]], share: float
) -> None:
    old, groups = old_and_groups
    tensors = the_tensors(old, share)
    parts = [[a_part(wire(v), weight=w, scale=s) for v, w, s in group] for group in groups]
    (done,) = tensors.merge(0, BUFFERS, parts, 0)()
    assert_between(read(done.wire), [old, *(each[0] for group in groups for each in group)])


def a_model(dtype: torch.dtype) -> tuple[nn.Module, ModelTensors, FlatState]:
    model = nn.Linear(2, 2)
    model.register_buffer("variance", torch.zeros(6))
    model.to(dtype)
    tensors = ModelTensors.of_module(model)
    (part,) = lay_out(tensors.manifest).fragments
    return model, tensors, tensors.capture(part)


six = st.lists(floats, min_size=6, max_size=6).map(torch.tensor)
HIGHEST = torch.full((6,), torch.finfo(torch.float32).max)  # in bf16: infinite


@example(
    new=torch.zeros(6),
    local=HIGHEST,
    anchor=HIGHEST,
    alpha=None,
    is_late=True,
    dtype=torch.bfloat16,
)
@given(
    new=six,
    local=six,
    anchor=six,
    alpha=st.none() | st.floats(min_value=0, max_value=1),
    is_late=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_merge_leaves_a_buffer_between_local_and_new(
    new: Tensor,
    local: Tensor,
    anchor: Tensor,
    alpha: float | None,
    is_late: bool,
    dtype: torch.dtype,
) -> None:
    model, tensors, state = a_model(dtype)
    model.get_buffer("variance").copy_(local)
    start = model.get_buffer("variance").clone()
    then = tensors.capture(state.layout)
    state.vectors[Segment.BUFFERS].copy_(new)
    then.vectors[Segment.BUFFERS].copy_(anchor)
    if alpha is None:
        tensors.bring_in(Change(state, origin=then))
    else:
        tensors.bring_in(Change(state, alpha, then if is_late else None))
    assert_between(model.get_buffer("variance"), [start, new.to(dtype)])
