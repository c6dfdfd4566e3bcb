"""CUDA graphs: a step inside one is seen when it is captured, and never again."""

from __future__ import annotations

import logging

import torch

logger = logging.getLogger("diloco.worker")

CAPTURED = (
    "optimizer.step() was captured in a CUDA graph: its replays call no hook, so their steps are not "
    "counted and this worker pushes nothing. Capture forward and backward alone, and call "
    "optimizer.step() behind each replay."
)


class CaptureWatch:
    """Says once that steps are lost; nothing else can be done, since a replay calls no Python."""

    def __init__(self) -> None:
        self.problem: str | None = None

    def sees_one(self) -> bool:
        """Whether the kernels of now are recorded instead of run; to be asked at each step."""
        # Without a device in use the second question may not be asked.
        in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        is_captured = in_use and torch.cuda.is_current_stream_capturing()
        if is_captured and self.problem is None:
            self.problem = CAPTURED
            logger.error(CAPTURED)
        return is_captured
