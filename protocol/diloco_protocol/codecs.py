"""Wire dtypes: how a chunk of fp32 values becomes bytes and is read again.

Values are accumulated in fp32 whatever travels. bf16 on the wire means
`decode(encode(x)) == x.bfloat16().float()`. Bytes are little-endian, as torch keeps them on every
machine that it supports.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from diloco_protocol.chunks import Segment
from diloco_protocol.dtypes import check_wire_dtype

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def wire_dtype(name: str) -> torch.dtype:
    """The torch dtype of a wire dtype's name; raises UsageError for an unknown one."""
    check_wire_dtype(name)
    return TORCH_DTYPES[name]


def segment_dtype(segment: Segment, parameters: torch.dtype) -> torch.dtype:
    """What a segment travels in, where parameters travel in `parameters`."""
    match segment:
        case Segment.PARAMETERS:
            return parameters
        case Segment.BUFFERS:
            return torch.float32
        case Segment.INTEGERS:
            return torch.int64


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, without a copy. The tensor must not change while the
    view is being sent: ZeroMQ would put the changed bytes on the wire."""
    return tensor.view(torch.uint8).numpy().data


def from_bytes(payload: Any, dtype: torch.dtype) -> Tensor:
    """A 1-D tensor over the payload's memory, without a copy. The payload must not be empty."""
    return torch.frombuffer(payload, dtype=dtype)


def has_nan(values: Tensor) -> bool:
    """True when an element is NaN; infinities do not count. One pass, no temporary."""
    if values.numel() == 0 or not values.is_floating_point():
        return False
    return bool(torch.isnan(torch.aminmax(values).min))  # aminmax hands NaN on


def is_finite(values: Tensor) -> bool:
    """True when no element is NaN or infinite; one pass, no temporary the size of the chunk."""
    if values.numel() == 0 or not values.is_floating_point():
        return True
    # A sum takes half as long as the extremes, and is finite only if every element is. One that is not
    # may be of large elements, and fp16 sums overflow at once.
    if values.dtype is not torch.float16 and math.isfinite(values.sum().item()):
        return True
    # aminmax hands NaN on, so the two extremes tell of every bad element.
    low, high = torch.aminmax(values)
    return bool(torch.isfinite(low) & torch.isfinite(high))
