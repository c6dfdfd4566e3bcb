"""Aggregates that look at each number by itself, against numpy's sort written out."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from diloco_broker.core.effects import WholePush
from diloco_broker.tensors.aggregate import StagedReducer
from diloco_broker.tensors.robust import (
    SORTED_ELEMENTS,
    middle_mean,
    trimmed,
)
from diloco_protocol.chunks import FragmentLayout, lay_out
from diloco_protocol.manifest import Kind, Manifest, TensorEntry
from kit.chunked_model import a_part, wire
from kit.raw_worker import DTYPES

Array = np.ndarray[Any, np.dtype[np.float64]]
LONG = SORTED_ELEMENTS + 7  # not a whole number of pieces
MANIFEST = Manifest(
    (
        TensorEntry("weight", (2 * LONG,), "float32", Kind.TRAINABLE),
        TensorEntry("variance", (5,), "float32", Kind.BUFFER),
        TensorEntry("count", (2,), "int64", Kind.BUFFER),
    )
)


def a_fragment(chunk_elements: int = LONG) -> FragmentLayout:
    return lay_out(MANIFEST, chunk_elements=chunk_elements).fragments[0]


def by_numpy(columns: Array, left_out: int) -> Array:
    """Yin et al. 2018, definition 2, with a number of workers: sort, cut, average."""
    inner = np.sort(columns, axis=0)[left_out : len(columns) - left_out]
    return np.asarray(inner.mean(axis=0))


def of_parts(parts: list[WholePush], aggregate: str, index: int = 0, trim: float = 0.2) -> Tensor:
    """What a reducer makes of the same chunk of several workers."""
    found = StagedReducer(aggregate, LONG, trim).reduced(a_fragment().spans[index], parts)
    assert found is not None
    return found.whole()


def merged(chunks: list[Tensor], *of: Any, **fields: Any) -> Tensor:
    return of_parts([a_part(wire(chunk, chunk.dtype)) for chunk in chunks], *of, **fields)


def columns_of(chunks: list[Tensor]) -> Array:
    return np.stack([chunk.double().numpy() for chunk in chunks])


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 8, 13])
@pytest.mark.parametrize("trim", [0.0, 0.2, 0.49])
def test_trimmed_mean_is_that_of_numpy(workers: int, trim: float) -> None:
    chunks = [torch.randn(LONG) * (1 + 9 * n) for n in range(workers)]
    left_out = min(math.ceil(trim * workers), (workers - 1) // 2)
    got = merged(chunks, "trimmed-mean", trim=trim)
    np.testing.assert_allclose(got, by_numpy(columns_of(chunks), left_out), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("workers", [*range(1, 10), 16, 31, 64])
def test_coordinate_median_is_that_of_numpy(workers: int) -> None:
    chunks = [torch.randn(LONG) * (1 + 9 * n) for n in range(workers)]
    got = merged(chunks, "coordinate-median")
    np.testing.assert_allclose(got, np.median(columns_of(chunks), axis=0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_values_are_put_in_order_as_they_travelled(name: str) -> None:
    sent = [torch.randn(LONG) for _ in range(5)]
    parts = [a_part(wire(each, DTYPES[name]), wire_dtype=name) for each in sent]
    columns = columns_of([each.to(DTYPES[name]).float() for each in sent])
    got = of_parts(parts, "coordinate-median")
    np.testing.assert_array_equal(got, np.median(columns, axis=0))
    got = of_parts(parts, "trimmed-mean")
    np.testing.assert_allclose(got, by_numpy(columns, 1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("aggregate", ["trimmed-mean", "coordinate-median"])
def test_result_is_the_same_in_any_order_and_for_any_weights(aggregate: str) -> None:
    chunks = [torch.randn(LONG) for _ in range(5)]
    forwards = merged(chunks, aggregate)
    parts = [a_part(wire(each), weight=10.0**n) for n, each in enumerate(chunks[::-1])]
    assert torch.equal(of_parts(parts, aggregate), forwards)


@pytest.mark.parametrize("aggregate", ["trimmed-mean", "coordinate-median"])
def test_outliers_in_buffers_and_counters_are_left_out(aggregate: str) -> None:
    spans = [span.segment.value for span in a_fragment().spans]
    buffers, integers = spans.index("buffers"), spans.index("integers")
    variances = [torch.full((5,), value) for value in (1.1, 1.1, 1.1, 1.1, 1e30)]
    parts = [a_part(wire(each), weight=1e6) for each in variances]
    assert of_parts(parts, aggregate, buffers).tolist() == torch.full((5,), 1.1).tolist()
    counts = [torch.tensor([n, -n]) for n in (3, 4, 5, 6, 2**62)]
    assert merged(counts, aggregate, integers).tolist() == [5, -5]


def test_mean_of_equal_values_is_that_value() -> None:
    for count in range(1, 40):
        rows = [torch.full((3,), 1.1) for _ in range(count)]
        assert middle_mean(rows, 0).tolist() == torch.full((3,), 1.1).tolist()


def test_large_values_are_averaged_without_overflow() -> None:
    rows = [torch.full((3,), 3e38) for _ in range(4)]
    assert middle_mean(rows, 0).isfinite().all()


def test_part_left_out_is_rounded_up_from_what_was_written() -> None:
    assert trimmed(100, 0.07) == 7, "in binary, 100 * 0.07 is a little more"
