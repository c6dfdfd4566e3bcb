"""A run on a Ray cluster: `from diloco_tools.ray import DiLoCoTrainer`."""

from __future__ import annotations

import importlib.util

from diloco_protocol.errors import UsageError

if importlib.util.find_spec("ray") is None:
    raise UsageError("Ray is not installed: pip install 'diloco-broker[ray]'.")

from diloco_tools.ray.island import report
from diloco_tools.ray.trainer import DiLoCoTrainer, Result

__all__ = ["DiLoCoTrainer", "Result", "report"]
