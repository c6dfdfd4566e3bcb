"""Work by compiled kernels, or by torch, whatever this process would choose."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from unittest.mock import patch

import pytest

from diloco_protocol import kernels

SWITCH = "DILOCO_KERNELS"
needs_kernels = pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed")


@contextmanager
def by_torch() -> Iterator[None]:
    with patch.dict(os.environ, {SWITCH: "torch"}):
        yield


@contextmanager
def by_kernels() -> Iterator[kernels.Kernels]:
    with patch.dict(os.environ):
        os.environ.pop(SWITCH, None)
        assert kernels.wait(300), "the kernels cannot be loaded"
        found = kernels.ready()
        assert found is not None
        yield found
