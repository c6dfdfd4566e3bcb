"""The memory pool for long-lived chunks of all brokers in this process; see `TensorPool`."""

from __future__ import annotations

from torch import Tensor

from diloco_protocol.tensors.tensor_pool import TensorPool

_pool = TensorPool()
empty = _pool.take
release = _pool.release


def empty_like(tensor: Tensor) -> Tensor:
    """An uninitialised 1-D tensor with the length and dtype of this one."""
    return empty(tensor.numel(), tensor.dtype)
