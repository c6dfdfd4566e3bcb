"""Runs whose pseudo-gradients travel in few bits equal the loop with the codecs in plain Python."""

from functools import partial
from typing import Any

import pytest
import torch

from diloco_broker import Broker
from kit.raw_codecs import decode, encode
from kit.reference import Plan, State, Trainee
from kit.whole_run import adamw, an_mlp, check, make_config, run, strided, trainees

CHUNK = 300  # a block and a part of one
FEW_BITS = ["int8", "int4", "int4z"]


class WithFeedback:
    """The way of all workers' deltas: what each leaves out goes with the next of the same fragment."""

    def __init__(self, wire: str) -> None:
        self.wire = wire
        self.residuals: dict[tuple[int, str], torch.Tensor] = {}

    def __call__(self, worker: int, delta: State) -> State:
        sent = {
            name: self.residuals.get((worker, name), torch.zeros(())) + value
            for name, value in delta.items()
        }
        read = as_read(sent, self.wire)
        for name, value in sent.items():
            self.residuals[worker, name] = value - read[name]
        return read


def as_read(delta: State, wire: str) -> State:
    """A fragment's delta behind its way: its tensors one behind the other, cut into chunks."""
    flat = torch.cat([value.reshape(-1) for value in delta.values()])
    read: list[float] = []
    for part in torch.split(flat, CHUNK):
        read += decode(encode(part.tolist(), wire), wire, len(part))
    sizes = [value.numel() for value in delta.values()]
    parts = torch.split(torch.tensor(read), sizes)
    return {
        name: part.view_as(value) for (name, value), part in zip(delta.items(), parts, strict=True)
    }


def with_adamw(worker: int) -> Trainee:
    return an_mlp(worker, adamw)


FRAGMENTS, REBASE = Plan(7, strided(2), 1, 0.25), Plan(7, strided(2), 2, None)


@pytest.mark.parametrize(
    ("codec", "plan"),
    [
        pytest.param("int8", Plan(3, strided(1)), id="int8-whole"),
        *(pytest.param(codec, FRAGMENTS, id=f"{codec}-fragments") for codec in FEW_BITS),
        pytest.param("int4z", REBASE, id="int4z-rebase"),
    ],
)
def test_run_in_few_bits_both_ways_equals_the_loop_bit_for_bit(codec: str, plan: Plan) -> None:
    """All workers hold the same bits behind each version: those of the loop's one copy."""
    check(
        plan,
        with_adamw,
        config={"wire_dtype": codec, "reply_dtype": codec, "chunk_elements": CHUNK},
        travels=WithFeedback(codec),
        replies=partial(as_read, wire=codec),
    )


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_run_in_top64_comes_to_its_end_with_what_it_has_learnt(mode: str) -> None:
    """Copies are compared at the end of each run. The model has 83 elements: all but 19 are sent."""
    options: dict[str, Any] = {"mode": mode, "sync_every": 4, "reply_dtype": "int8"}
    with Broker(make_config(**options, wire_dtype="top64")) as broker:
        first, last = run(broker, trainees(1), 4).final, run(broker, trainees(1), 40).final
    assert any(not torch.equal(first[name], last[name]) for name in first)
    assert all(bool(torch.isfinite(value).all()) for value in last.values())
