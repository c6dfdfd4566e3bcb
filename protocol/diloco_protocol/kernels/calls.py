"""The compiled kernels, called with tensors; numba is not imported here, but handed in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diloco_protocol.dtypes import BLOCK, SCALE_BYTES
from diloco_protocol.kernels.forms import BF16, FP16, FP32

# By the dtype of a tensor in this form.
FORMS = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}
# The bits of the least magnitude that is rounded to infinity, by the form it is rounded to.
OVERFLOW = {FP32: 0x7F800000, BF16: 0x7F7F8000, FP16: 0x477FF000}
_NO_FLOATS, _NO_HALVES = np.empty(0, np.float32), np.empty(0, np.uint16)


@dataclass(frozen=True, eq=False)
class Source:
    """A chunk of finite length as kernels read it: its memory on the host, its form and elements."""

    form: int
    data: Tensor  # contiguous
    elements: int

    @classmethod
    def of(cls, values: Tensor) -> Source:
        """One of the dtypes in `FORMS`."""
        return cls(FORMS[values.dtype], _aligned(values), values.numel())

    @classmethod
    def coded(cls, form: int, data: Tensor, elements: int) -> Source:
        """Scales and codes, as bytes."""
        return cls(form, data if data.data_ptr() % 2 == 0 else data.clone(), elements)

    def values(self) -> Tensor:
        """What it was made `of`."""
        assert self.data.dtype in FORMS, "a coded chunk is for kernels"
        return self.data


Terms = Sequence[tuple[Source, float]]
"""A sum of weighted chunks, all of the same length."""


class Kernels:
    """The functions of `compiled`. Tensors are 1-D, contiguous, on the host."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled

    def add_up(self, terms: Terms, divisor: float, out: Tensor) -> None:
        """out <- sum(w_i x_i) / divisor, fp32; `out` may be the memory of a term."""
        assert all(source.elements == out.numel() for source, _ in terms)
        self._compiled.add_up(*_terms(terms), divisor, out.numpy())

    def squares(self, source: Source) -> float | None:
        """The sum of squared values of a coded chunk; None where one may be too large for fp32."""
        found: float = self._compiled.squares(source.form, *_parts(source.data, source.elements))
        return found if math.isfinite(found) else None

    def nesterov(
        self,
        terms: Terms,
        divisor: float,
        theta: Tensor,
        momentum: Tensor | None,
        *,
        settings: tuple[float, float, bool],
        out: tuple[Tensor, Tensor | None, Tensor],
    ) -> bool:
        """A step with the mean of the terms: see `compiled.nesterov`.

        Args:
            momentum: as it was; None where there is none yet.
            settings: mu, the learning rate, and whether it is Nesterov's form.
            out: memory for the parameters, for the momentum (None: there is none) and for the
                parameters in wire form, which is the first where they travel in fp32.

        Returns:
            Whether the parameters are finite in wire form.
        """
        moved, after, wire = out
        form = FORMS[wire.dtype]
        most: int = self._compiled.nesterov(
            *_terms(terms), divisor, theta.numpy(),
            _floats(momentum), *settings, moved.numpy(), _floats(after),
            form, _NO_HALVES if form == FP32 else wire.view(torch.uint16).numpy(),
        )  # fmt: skip
        return most < OVERFLOW[form]

    def encode(
        self,
        codec: tuple[int, bool],
        values: Tensor,
        other: Tensor | None,
        sign: float,
        out: Tensor,
    ) -> bool:
        """Scales and codes of `values + sign other` into bytes; whether it is finite, else rubbish.

        `codec` is the form, and whether scales are roots of mean squares.
        """
        scales, codes = _parts(out, values.numel())
        found: bool = self._compiled.encode(
            *codec, values.numpy(), _floats(other), sign, scales, codes
        )
        return found

    def shift(
        self, source: Source, values: Tensor, other: Tensor | None, sign: float, out: Tensor
    ) -> tuple[int, bool]:
        """out <- (values + other) + sign x; `out` may be one of them.

        Returns:
            The checksum of the result, and whether it is finite.
        """
        checksum, most = self._compiled.shift(
            source.form, source.data.data_ptr(), values.numpy(), _floats(other), sign, out.numpy()
        )
        return int(checksum), most < OVERFLOW[FP32]

    def agree(self) -> bool:
        """Whether a weighted sum and a step have torch's bits: that may not fuse on some machine."""
        made = torch.Generator().manual_seed(0)
        one, other, theta, m = torch.randn(4, 1029, generator=made)
        mean = one.mul(0.3).add_(other, alpha=0.7).div_(1.1)
        after = m.mul(0.9).add_(mean)
        wanted = theta.add(mean.add(after, alpha=0.9), alpha=-0.7)
        moved, kept = torch.empty_like(theta), torch.empty_like(theta)
        terms = [(Source.of(one), 0.3), (Source.of(other), 0.7)]
        settings, out = (0.9, 0.7, True), (moved, kept, moved)
        self.nesterov(terms, 1.1, theta, m, settings=settings, out=out)
        return torch.equal(kept, after) and torch.equal(moved, wanted)


def _terms(terms: Terms) -> tuple[Any, Any, Any]:
    sources = [source for source, _ in terms]
    return (
        np.array([source.form for source in sources], np.int64),
        np.array([source.data.data_ptr() for source in sources], np.int64),
        np.array([weight for _, weight in terms], np.float32),
    )


def _parts(coded: Tensor, elements: int) -> tuple[Any, Any]:
    """Its scales and its codes."""
    ends = SCALE_BYTES * -(-elements // BLOCK)
    return coded[:ends].view(torch.uint16).numpy(), coded[ends:].numpy()


def _floats(values: Tensor | None) -> Any:
    return _NO_FLOATS if values is None else _aligned(values).numpy()


def _aligned(values: Tensor) -> Tensor:
    """The same where its elements have the addresses that their size asks for."""
    return values if values.data_ptr() % values.element_size() == 0 else values.clone()
