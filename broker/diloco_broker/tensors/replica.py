"""Quantized replies: a replica of the master parameters, which every worker replicates bit for bit.

EF21-P (Gruntkowska et al. 2022, arXiv 2209.15218). x is the master, in fp32; w its replica. After each
outer step c = C(x - w) is sent, and w <- w + D(c) is applied here and at each worker. The quantization
error stays in x - w, and is sent with the next step, so the replica follows the master. Replicas never
drift apart, because the product of code and scale is exact in fp32 and the sum is rounded identically.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diloco_broker.core.versions.reply import Coded
from diloco_broker.tensors.memory import empty, empty_like
from diloco_protocol.tensors.codecs import as_bytes, checksum, follow

# Name of the replica in a checkpoint.
REPLICA = "shadow"


@torch.no_grad()
def followed(reply: str, replica: Tensor, master: Tensor) -> tuple[Tensor, Coded]:
    """Move the replica of a chunk towards its master; returns the new replica and its wire form.

    If no fp32 difference leads from one to the other, the chunk is sent in full.
    """
    moved = empty_like(replica)
    found = follow(reply, master, replica, moved, lambda count: empty(count, torch.uint8))
    return (moved, Coded(as_bytes(moved), *found)) if found else (master, in_full(master))


def in_full(values: Tensor) -> Coded:
    """The full chunk, for workers that do not hold the version before."""
    return Coded(as_bytes(values), None, checksum(values))
