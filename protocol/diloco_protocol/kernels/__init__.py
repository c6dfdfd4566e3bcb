"""Compiled kernels for tensor work on chunks in host memory, each in one pass over memory (kernels.c).

`ready` returns them. If it returns None, torch does the same work in more passes, with identical
results: if the package was built without a C compiler, if the kernels round differently from torch on
this machine, or with `DILOCO_KERNELS=torch`.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import math
import os
import platform
from collections.abc import Sequence
from ctypes import (
    POINTER,
    c_bool,
    c_char,
    c_double,
    c_float,
    c_int,
    c_int64,
    c_ssize_t,
    c_uint32,
    c_uint64,
)
from ctypes import c_void_p as address
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from diloco_protocol.dtypes import BLOCK, SCALE_BYTES, SPARSE_BLOCK, sparse_bytes

logger = logging.getLogger("diloco.kernels")
SWITCH = "DILOCO_KERNELS"
LIBRARY = Path(__file__).with_name("kernels.so")  # built by hatch_build.py
# Memory formats of a chunk; the last two are scales and codes. Those above are sparse: how many elements
# of each block are kept.
FP32, BF16, FP16, INT8, INT4 = range(5)
FORMS = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}
CODE_BYTES = {INT8: BLOCK, INT4: BLOCK // 2}  # bytes of the codes of a block
# The bits of the smallest fp32 magnitude that is rounded to infinity, by target format.
OVERFLOW = {FP32: 0x7F800000, BF16: 0x7F7F8000, FP16: 0x477FF000}


def coded_bytes(form: int, elements: int) -> int:
    """The size of a coded chunk, in bytes."""
    if form not in CODE_BYTES:
        return -(-elements // SPARSE_BLOCK) * sparse_bytes(form)
    return -(-elements // BLOCK) * (SCALE_BYTES + CODE_BYTES[form])


class _Term(ctypes.Structure):
    _fields_ = [("form", c_int64), ("data", address), ("weight", c_float)]


_TERMS = [POINTER(_Term), c_ssize_t, c_float, c_ssize_t]
_FOUND = [POINTER(c_uint64), POINTER(c_uint32)]
_WIRE = [address, address, c_int, address]
# The arguments and results of the functions in kernels.c.
_SIGNATURES = {
    "add_up": (None, [*_TERMS, address]),
    "squares": (c_double, [c_int, address, c_ssize_t]),
    "ascends": (c_bool, [c_int, address, c_ssize_t]),
    "encode": (
        c_bool,
        [c_int, c_bool, address, address, c_float, c_ssize_t, address, address, *_FOUND],
    ),
    "shift": (None, [c_int, address, c_ssize_t, address, address, c_float, address, *_FOUND]),
    "nesterov": (c_uint32, [*_TERMS, address, address, c_float, c_float, c_bool, *_WIRE]),
    "delayed": (c_uint32, [*_TERMS, address, address, address, *[c_float] * 4, c_bool, *_WIRE]),
}


@dataclass(frozen=True, eq=False)
class Source:
    """A chunk as an input of kernels: its format, and its host memory, which may be unaligned."""

    form: int
    data: Tensor  # contiguous
    elements: int

    @classmethod
    def of(cls, values: Tensor) -> Source:
        """A source of values in one of the dtypes in `FORMS`."""
        assert values.is_contiguous()
        return cls(FORMS[values.dtype], values, values.numel())

    @classmethod
    def coded(cls, form: int, data: Tensor, elements: int) -> Source:
        """A source of scales and codes, as bytes."""
        assert data.numel() == coded_bytes(form, elements)
        return cls(form, data, elements)

    def values(self) -> Tensor:
        """The values that were given to `of`."""
        assert self.data.dtype in FORMS, "only kernels read coded chunks"
        return self.data


Terms = Sequence[tuple[Source, float]]
"""A sum of weighted chunks, all of the same length."""


class Kernels:
    """The functions of kernels.c. Tensors are 1-D, contiguous, on the host, and fp32 unless stated.

    The functions release the interpreter's lock.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, f"diloco_{name}")
            function.restype, function.argtypes = result, arguments
        self._library = library

    def add_up(self, terms: Terms, divisor: float, out: Tensor) -> None:
        """out <- sum(w_i x_i) / divisor; `out` may be the memory of a term."""
        elements = out.numel()
        self._library.diloco_add_up(*_sum(terms, divisor, elements), _at(out, elements))

    def squares(self, source: Source) -> float | None:
        """The sum of squared values of a coded chunk; None if a value may be too large for fp32."""
        found: float = self._library.diloco_squares(
            source.form, source.data.data_ptr(), source.elements
        )
        return found if math.isfinite(found) else None

    def ascends(self, form: int, data: Tensor, elements: int) -> bool:
        """Whether the indices in each block of a sparse chunk are in ascending order."""
        return bool(self._library.diloco_ascends(form, data.data_ptr(), elements))

    def encode(
        self,
        codec: tuple[int, bool],
        values: Tensor,
        out: Tensor,
        *,
        other: Tensor | None = None,
        sign: float = 1.0,
        followed: Tensor | None = None,
    ) -> int | None:
        """Encode y = values + sign other as scales and codes into the bytes `out`.

        Args:
            codec: the format, and whether scales are roots of mean squares.
            followed: memory for other + D(y), where D(y) is the decoded y.

        Returns:
            The checksum of `followed`, or 0 without it. None if y or `followed` is not finite; then the
            content of both is undefined.
        """
        elements, (form, is_rms) = values.numel(), codec
        assert out.numel() == coded_bytes(form, elements)
        checksum, top = c_uint64(), c_uint32()
        is_finite = self._library.diloco_encode(
            form, is_rms, _at(values, elements), _at(other, elements), sign, elements,
            out.data_ptr(), _at(followed, elements), checksum, top,
        )  # fmt: skip
        return checksum.value if is_finite and top.value < OVERFLOW[FP32] else None

    def shift(
        self, source: Source, values: Tensor, other: Tensor | None, sign: float, out: Tensor
    ) -> int | None:
        """out <- (values + other) + sign x, where x is a coded chunk; `out` may be one of them.

        Returns:
            The checksum of the result; None if it is not finite.
        """
        elements = source.elements
        checksum, top = c_uint64(), c_uint32()
        self._library.diloco_shift(
            source.form, source.data.data_ptr(), elements, _at(values, elements),
            _at(other, elements), sign, _at(out, elements), checksum, top,
        )  # fmt: skip
        return checksum.value if top.value < OVERFLOW[FP32] else None

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
        """A step with the mean of the terms: see `diloco_nesterov`.

        Args:
            momentum: None before the first step.
            settings: mu, the learning rate, and whether it is Nesterov momentum.
            out: memory for the parameters, for the momentum (None: not kept) and for the parameters in
                wire form, which is the first if that is fp32.

        Returns:
            Whether the parameters are finite in wire form.
        """
        elements, (moved, after, wire) = theta.numel(), out
        top: int = self._library.diloco_nesterov(
            *_sum(terms, divisor, elements), _at(theta, elements), _at(momentum, elements),
            *settings, _at(moved, elements), _at(after, elements), *_wire(wire, elements),
        )  # fmt: skip
        return top < OVERFLOW[FORMS[wire.dtype]]

    def delayed(
        self,
        terms: Terms,
        divisor: float,
        theta: Tensor,
        state: tuple[Tensor | None, Tensor | None],
        *,
        settings: tuple[float, int, float, float, bool],
        out: tuple[Tensor, Tensor, Tensor],
    ) -> bool:
        """A step of Delayed Nesterov: see `diloco_delayed`.

        Args:
            state: the buffer's sum and the momentum; None if it does not exist yet.
            settings: mu, the buffer's size at a boundary (otherwise 0), the rates of g and m', and
                whether m' is applied.
            out: memory for the parameters, for m' at a boundary (otherwise the buffer's sum) and for
                the parameters in wire form, as in `nesterov`.

        Returns:
            Whether the parameters, in wire form, and the buffer are finite.
        """
        elements, (moved, kept, wire) = theta.numel(), out
        top: int = self._library.diloco_delayed(
            *_sum(terms, divisor, elements), _at(theta, elements),
            *(_at(each, elements) for each in state), *settings,
            _at(moved, elements), _at(kept, elements), *_wire(wire, elements),
        )  # fmt: skip
        return top < OVERFLOW[FORMS[wire.dtype]]

    def agree(self) -> bool:
        """Whether a weighted sum and a step equal torch's bit for bit, which may fuse differently."""
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


@cache  # called several times for each chunk
def ready() -> Kernels | None:
    """Return the kernels; None if torch must do their work."""
    return None if os.environ.get(SWITCH) == "torch" else load()


@cache
def load() -> Kernels | None:
    """Load the library once. Returns None, and logs the reason, if it cannot be used."""
    # On x86 they are built for AVX2 and FMA, with which torch fuses products and sums too.
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    try:
        if not LIBRARY.exists():
            raise OSError("the package was installed without a C compiler")
        if is_x86 and torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
            raise OSError("this processor has no AVX2")
        library = ctypes.CDLL(str(LIBRARY))
        source = hashlib.blake2b(LIBRARY.with_suffix(".c").read_bytes(), digest_size=8).hexdigest()
        if (c_char * len(source)).in_dll(library, "diloco_source").value.decode() != source:
            raise OSError("they were built from other sources; reinstall the package")
        kernels = Kernels(library)
        if not kernels.agree():
            raise OSError("they round differently from torch on this machine")
    except (OSError, ValueError) as error:
        logger.info("Using torch instead of compiled kernels for tensor work: %s.", error)
        return None
    return kernels


def _at(tensor: Tensor | None, elements: int) -> int | None:
    if tensor is None:
        return None
    assert tensor.dtype is torch.float32
    assert tensor.numel() == elements
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def _sum(
    terms: Terms, divisor: float, elements: int
) -> tuple[ctypes.Array[_Term], int, float, int]:
    assert all(source.elements == elements for source, _ in terms)
    made = [_Term(source.form, source.data.data_ptr(), weight) for source, weight in terms]
    return (_Term * len(made))(*made), len(made), divisor, elements


def _wire(wire: Tensor, elements: int) -> tuple[int, int]:
    assert wire.numel() == elements
    assert wire.is_contiguous()
    return FORMS[wire.dtype], wire.data_ptr()
