"""Work by compiled kernels, or by torch, whatever this process would choose."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest

from diloco_protocol import kernels

SWITCH = "DILOCO_KERNELS"


@contextmanager
def by_torch() -> Iterator[None]:
    with patch.dict(os.environ, {SWITCH: "torch"}), _asked_anew():
        yield


@contextmanager
def by_kernels() -> Iterator[kernels.Kernels]:
    with patch.dict(os.environ):
        os.environ.pop(SWITCH, None)
        with _asked_anew():
            found = kernels.ready()
            assert found is not None
            yield found


@contextmanager
def _asked_anew() -> Iterator[None]:
    """What `ready` said before does not hold in here, nor what it says in here afterwards."""
    kernels.ready.cache_clear()
    try:
        yield
    finally:
        kernels.ready.cache_clear()


needs_kernels = pytest.mark.skipif(
    not kernels.LIBRARY.exists(), reason="installed without a C compiler"
)
