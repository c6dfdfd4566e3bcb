"""Where a worker's vectors lie: on the host, pinned or not, or beside the model on its accelerator.

By default the global parameters are on the host, and memory that is copied to or from a CUDA device is
pinned: copies are queued then, and faster, but the system cannot use such memory for anything else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from diloco_protocol import UsageError

CPU, CUDA = "cpu", "cuda"
HOST = torch.device(CPU)
# Devices whose deltas are computed on the host: mps has no fp64, and shares the host's memory.
_ON_HOST = (CPU, "mps")


@dataclass(frozen=True)
class Placement:
    """The choice for one worker."""

    is_pinned: bool = False  # vectors on the host that a CUDA device reads or writes
    base: torch.device = HOST  # of the global parameters

    @classmethod
    def of(
        cls,
        devices: Iterable[torch.device],
        pin_memory: bool | None = None,
        keep_global_on: str | None = None,
    ) -> Placement:
        """The placement for a model with tensors on these devices.

        Args:
            pin_memory: None: where there is a CUDA device.
            keep_global_on: "cuda" stands for the first CUDA device of the model; None for "cpu".

        Raises:
            UsageError: it is impossible with this model.
        """
        found = list(devices)
        on_cuda = [device for device in found if device.type == CUDA]
        where = ", ".join(sorted({str(device) for device in found})) or "no device"
        if pin_memory and not on_cuda:
            raise UsageError(
                f"pin_memory is True, but the model is on {where}, and memory is pinned for CUDA "
                "devices only; leave it out."
            )
        if keep_global_on == CUDA and not on_cuda:
            raise UsageError(
                f"keep_global_on is 'cuda', but the model is on {where}; move it there first, or leave "
                "it out."
            )
        base = on_cuda[0] if keep_global_on == CUDA else HOST
        return cls(bool(on_cuda) and pin_memory is not False, base)


def accelerator_of(devices: Iterable[torch.device]) -> torch.device:
    """Where deltas of a model on these devices are computed: the first accelerator, or the host."""
    return next((each for each in devices if each.type not in _ON_HOST), HOST)
