"""Take part in a DiLoCo run: `DiLoCoWorker` around a training loop, or `DiLoCoClient` call by call."""

from diloco_worker.client import DiLoCoClient, GlobalParameters
from diloco_worker.hook import DiLoCoWorker
from diloco_worker.model.flat_state import manifest_of

__all__ = ["DiLoCoClient", "DiLoCoWorker", "GlobalParameters", "manifest_of"]
