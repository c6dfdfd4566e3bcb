"""Quantized replies: a replica of the master parameters, which every worker replicates bit for bit.

EF21-P (Gruntkowska et al. 2022, arXiv 2209.15218). x is the master, in fp32; w its replica. After each
outer step c = C(x - w) is sent, and w <- w + D(c) is applied here and at each worker. The quantization
error stays in x - w, and is sent with the next step, so the replica follows the master. Replicas never
drift apart, because the product of code and scale is exact in fp32 and the sum is rounded identically.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco_broker.core.versions.reply import Coded
from diloco_broker.tensors.memory import empty, empty_like
from diloco_protocol.chunks import ChunkSpan, Segment
from diloco_protocol.dtypes import is_quantized
from diloco_protocol.tensors.codecs import as_bytes, checksum, follow

# Name of the replica in a checkpoint.
REPLICA = "shadow"


@dataclass(eq=False, repr=False)
class Replicas:
    """The replica of each chunk of parameters; empty unless replies are quantized.

    `reply` is the dtype of parameters in replies. A replica is never modified: a step makes a new one.
    """

    reply: str

    def __post_init__(self) -> None:
        self._values: dict[tuple[int, int], Tensor] = {}

    def has(self, span: ChunkSpan) -> bool:
        """Whether a chunk is sent as a difference from its replica."""
        return is_quantized(self.reply) and span.segment is Segment.PARAMETERS

    def put(self, fragment: int, index: int, replica: Tensor) -> None:
        """Set the values that workers hold."""
        self._values[fragment, index] = replica

    def forget(self, fragment: int) -> None:
        for key in [key for key in self._values if key[0] == fragment]:
            del self._values[key]

    def of(self, fragment: int, index: int) -> Tensor | None:
        """The values of a chunk that workers hold; None if they hold the master itself."""
        return self._values.get((fragment, index))

    def whole(self, fragment: int, index: int) -> Coded:
        """The full chunk, for workers that do not hold the version before."""
        return _whole(self._values[fragment, index])

    def kept(self, fragment: int, count: int) -> Mapping[str, list[Tensor | None]]:
        """The replicas of a fragment for a checkpoint, by name; empty if it has none."""
        found = [self.of(fragment, index) for index in range(count)]
        return {REPLICA: found} if any(each is not None for each in found) else {}


@torch.no_grad()
def followed(reply: str, replica: Tensor, master: Tensor) -> tuple[Tensor, Coded]:
    """Move the replica of a chunk towards its master; returns the new replica and its wire form.

    If no fp32 difference leads from one to the other, the chunk is sent in full.
    """
    moved = empty_like(replica)
    found = follow(reply, master, replica, moved, lambda count: empty(count, torch.uint8))
    return (moved, Coded(as_bytes(moved), *found)) if found else (master, _whole(master))


def _whole(values: Tensor) -> Coded:
    return Coded(as_bytes(values), None, checksum(values))
