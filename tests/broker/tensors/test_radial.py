"""Radial-directional averaging against its formula on whole tensors, in plain torch and fp64."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from diloco_broker.core.effects import WholePush
from diloco_broker.core.events import Stepped
from diloco_broker.tensors.outer.chunked import Nesterov
from diloco_broker.tensors.parameters import Parameters
from diloco_broker.tensors.radial import is_averaged_plainly
from diloco_protocol.chunks import Segment, lay_out
from diloco_protocol.manifest import Kind, Manifest, TensorEntry
from kit.chunked_model import a_part, wire
from kit.raw_worker import DTYPES

SHAPES = {
    "tok_embeddings.weight": (5, 3),
    "layers.0.wq.weight": (4, 6),
    "layers.0.norm.weight": (6,),
    "layers.1.conv.weight": (2, 3, 4),
    "scale": (),
    "output.weight": (5, 3),
}
PLAIN = {"tok_embeddings.weight", "layers.0.norm.weight", "scale"}
MATRICES = SHAPES.keys() - PLAIN
MANIFEST = Manifest(
    tuple(TensorEntry(name, shape, "float32", Kind.TRAINABLE) for name, shape in SHAPES.items())
)
Push = dict[str, Tensor]


class Run:
    """Parameters of 0, stepped with eta = 1 and without momentum: they become minus the gradient."""

    def __init__(
        self, aggregate: str = "rda", *, chunk_elements: int = 7, fragments: int = 1
    ) -> None:
        of = {name: number % fragments for number, name in enumerate(SHAPES)}
        self.layout = lay_out(MANIFEST, of, num_fragments=fragments, chunk_elements=chunk_elements)
        outer = Nesterov(1.0, 0.0)
        self.tensors = Parameters(
            self.layout, outer, wire="fp32", reply="fp32", aggregate=aggregate
        )
        for part in self.layout.fragments:
            for span in part.spans:
                self.tensors.place(part.fragment, span.index, wire(torch.zeros(span.elements)))

    def sent(self, fragment: int, push: Push, number: int, weight: float, dtype: str) -> WholePush:
        part = self.layout.fragments[fragment]
        flat = torch.cat([push[place.entry.name].reshape(-1) for place in part.places])
        chunks = [wire(flat[span.start : span.stop], DTYPES[dtype]) for span in part.spans]
        made = a_part(None, weight=weight, wire_dtype=dtype)
        return replace(made, worker_id=f"w{number}", payloads=chunks)

    def merge(self, fragment: int, parts: Sequence[WholePush], count: int) -> list[Stepped]:
        done: list[Stepped] = []
        for span in self.layout.fragments[fragment].spans:
            here = [each for each in parts if each.payloads[span.index] is not None]
            done += self.tensors.merge(fragment, span.index, [here], count, [parts])()
        return done

    def gradient(
        self,
        pushes: Sequence[Push],
        weights: Sequence[float] = (),
        dtype: str = "fp32",
        lacks: tuple[int, int] | None = None,
    ) -> Push:
        """The gradient of a round by name. `lacks` is a chunk that a push lacks: push, index."""
        weights, found = weights or [1.0] * len(pushes), Push()
        for part in self.layout.fragments:
            before = self._values(part.fragment)
            parts = [
                self.sent(part.fragment, push, number, weight, dtype)
                for number, (push, weight) in enumerate(zip(pushes, weights, strict=True))
            ]
            if lacks is not None:
                payloads = list(parts[lacks[0]].payloads)
                payloads[lacks[1]] = None
                parts[lacks[0]] = replace(parts[lacks[0]], payloads=payloads)
            assert not any(each.overflow for each in self.merge(part.fragment, parts, 0))
            after = self._values(part.fragment)
            found |= {name: before[name] - after[name] for name in before}
        return found

    def _values(self, fragment: int) -> Push:
        flat = torch.cat(list(self.tensors.fragment_tensors(fragment).chunks))
        return {
            place.entry.name: flat[place.start : place.stop].reshape(place.entry.shape)
            for place in self.layout.fragments[fragment].places
            if place.segment is Segment.PARAMETERS
        }


def some_pushes(workers: int) -> list[Push]:
    return [
        {name: torch.randn(shape) * 10.0 ** (n - 2) for name, shape in SHAPES.items()}
        for n in range(workers)
    ]


def mean(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    total = torch.stack([w * v for w, v in zip(weights, values, strict=True)]).sum(0)
    return total / sum(weights)


def by_formula(name: str, pushes: Sequence[Push], weights: Sequence[float], dtype: str) -> Tensor:
    values = [push[name].to(DTYPES[dtype]).double() for push in pushes]
    if name in PLAIN:
        return mean(values, weights)
    length = mean([value.norm() for value in values], weights)
    direction = mean([value / value.norm() for value in values], weights)
    return length * torch.nn.functional.normalize(direction.flatten(), dim=0).view_as(direction)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("chunk_elements", [1, 7, 64])
@pytest.mark.parametrize("fragments", [1, 3])
def test_lengths_and_directions_are_means(fragments: int, chunk_elements: int, dtype: str) -> None:
    run = Run(chunk_elements=chunk_elements, fragments=fragments)
    pushes, weights = some_pushes(3), [1.0, 2.5, 0.25]
    got = run.gradient(pushes, weights, dtype)
    for name in SHAPES:
        wanted = by_formula(name, pushes, weights, dtype).float()
        torch.testing.assert_close(got[name], wanted, rtol=2e-5, atol=2e-5 * float(wanted.norm()))


def test_embeddings_vectors_and_single_pushes_are_plain_means() -> None:
    pushes = some_pushes(3)
    rda, plain = Run().gradient(pushes), Run("mean").gradient(pushes)
    assert {name for name in SHAPES if torch.equal(rda[name], plain[name])} == PLAIN
    alone = Run().gradient(pushes[:1])
    assert all(torch.equal(alone[name], pushes[0][name]) for name in SHAPES)


def test_pushes_without_a_length_or_a_common_direction() -> None:
    (push,) = some_pushes(1)
    opposite = {name: -3 * value for name, value in push.items()}
    zero = {name: 0 * value for name, value in push.items()}
    for name, value in Run().gradient([push, opposite]).items():
        wanted = -push[name] if name in PLAIN else zero[name]
        torch.testing.assert_close(value, wanted)
    # A zero has no direction, but counts for the mean length.
    for name, value in Run().gradient([push, zero], [1.0, 3.0]).items():
        torch.testing.assert_close(value, push[name] / 4)
    assert all(not value.any() for value in Run().gradient([zero, zero]).values())


def test_factor_beyond_fp32_costs_the_step_and_not_the_broker() -> None:
    tiny, huge = ({name: torch.full(s, x) for name, s in SHAPES.items()} for x in (1e-12, 1e37))
    run = Run(chunk_elements=1000)
    parts = [run.sent(0, push, n, 1e9, "fp32") for n, push in enumerate((tiny, huge))]
    (done,) = run.merge(0, parts, 0)
    assert done.overflow
    assert not any(value.any() for value in run._values(0).values())


def test_tensor_of_which_an_earlier_version_has_a_part_takes_the_plain_mean() -> None:
    pushes = some_pushes(3)
    run = Run(chunk_elements=8)  # chunks 1 to 4 have parts of wq, 15 to 39
    got, plain = run.gradient(pushes, lacks=(1, 2)), Run("mean").gradient(pushes)
    others = Run("mean").gradient([pushes[0], pushes[2]])
    name = "layers.0.wq.weight"
    wanted = plain[name].reshape(-1).clone()
    wanted[1:9] = others[name].reshape(-1)[1:9]  # elements 16 to 24
    torch.testing.assert_close(got[name].reshape(-1), wanted)
    for other in MATRICES - {name}:
        wanted = by_formula(other, pushes, [1.0] * 3, "fp32").float()
        torch.testing.assert_close(got[other], wanted, rtol=2e-5, atol=2e-5 * float(wanted.norm()))


@pytest.mark.parametrize(
    ("name", "shape", "aliases", "plain"),
    [
        ("model.embed_tokens.weight", (9, 4), (), True),
        ("transformer.wte.weight", (9, 4), (), True),
        ("wpe.weight", (9, 4), (), True),
        ("tok_emb.weight", (9, 4), (), True),
        ("lm_head.weight", (9, 4), ("transformer.wte.weight",), True),
        ("lm_head.weight", (9, 4), (), False),
        ("member.weight", (4, 4), (), False),
        ("h.0.attn.c_attn.weight", (4, 12), (), False),
        ("h.0.ln_1.weight", (4,), (), True),
        ("experts", (8, 4, 4), (), False),
    ],
)
def test_embeddings_are_recognised_by_name(
    name: str, shape: tuple[int, ...], aliases: tuple[str, ...], plain: bool
) -> None:
    entry = TensorEntry(name, shape, "float32", Kind.TRAINABLE, aliases)
    assert is_averaged_plainly(entry) == plain
