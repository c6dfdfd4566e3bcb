"""Take part in a DiLoCo run: `DiLoCoWorker` around a training loop, or `DiLoCoClient` call by call."""

from diloco_worker.client import DiLoCoClient, GlobalParameters
from diloco_worker.hook import DiLoCoWorker

__all__ = ["DiLoCoClient", "DiLoCoWorker", "GlobalParameters"]
