"""The tensor work that the core asks for: queued, lent to threads where there are some, and done."""

from __future__ import annotations

from diloco_broker.shell.tensor_work.executor import TensorExecutor

__all__ = ["TensorExecutor"]
