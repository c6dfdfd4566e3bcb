"""How the numbers of a chunk lie in memory, for kernels: `FP32`, `BF16`, `FP16`, or scales and codes."""

from __future__ import annotations

FP32, BF16, FP16, INT8, INT4 = range(5)
