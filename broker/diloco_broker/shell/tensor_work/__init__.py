"""Executes the tensor work of the core: a queue, optional threads, and the executor."""

from __future__ import annotations

from diloco_broker.shell.tensor_work.executor import TensorExecutor

__all__ = ["TensorExecutor"]
