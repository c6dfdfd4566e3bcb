"""The settings of a run on Kubernetes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco_tools.options import matching, option

CONTROL_PORT, FEED_PORT, METRICS_PORT, RENDEZVOUS_PORT = 8512, 8513, 9512, 29400
Object = dict[str, Any]

# Short enough that pod names, `NAME-island-123-node-0-12`, are DNS labels too.
LABEL = r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?"
label = matching(LABEL, "lower-case letters, digits and dashes, a letter first, at most 40")
# Of Kubernetes: 2, 500m, 1.5, 16Gi, 1e9.
quantity = matching(
    r"\d+(\.\d+)?([eE]\d+|m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?",
    "a Kubernetes quantity such as 2, 500m or 16Gi",
)
image = matching(r"[!-~]{1,255}", "the name of an image")


@dataclass(frozen=True)
class KubernetesRun:
    """A run. Fields declared as options are those of `diloco-launch kubernetes`.

    Attributes:
        keys: folder of keys that `make_keys` has filled.
        broker_image, worker_image: built from the Dockerfile's targets `broker` and `worker`.
        command: starts the training in each pod of an island.
        serve: options of `diloco-broker serve`.
    """

    keys: Path
    broker_image: str
    worker_image: str
    command: tuple[str, ...]
    islands: int
    serve: tuple[str, ...] = ()
    nodes: int = option(1, "Pods of each worker.", "--nodes-per-island", min=1)
    name: str = option("diloco", "Name of the run; all names begin with it.", parse=label)
    namespace: str = option("default", "Namespace of the objects.", parse=label)
    gpus: int = option(0, "NVIDIA GPUs of each pod.", "--gpus-per-node", min=0)
    storage: str = option("20Gi", "Size of the broker's disk.", parse=quantity)
    storage_class: str | None = option(None, "Storage class of that disk.", parse=label)
    broker_cpu: str = option("2", "Cores of the broker.", parse=quantity)
    broker_memory: str = option("8Gi", "Memory of the broker.", parse=quantity)
    worker_cpu: str = option("4", "Cores of each pod of an island.", parse=quantity)
    worker_memory: str = option("16Gi", "Memory of each pod of an island.", parse=quantity)
    grace: int = option(120, "Seconds between SIGTERM and SIGKILL.", min=1, max=3600)
    restarts: int = option(3, "Consecutive restarts of an island of one pod in its pod.", min=0)
    replacements: int = option(100, "Replacements of the pods of an island.", min=0)

    @property
    def broker(self) -> str:
        return f"{self.name}-broker"

    @property
    def server(self) -> str:
        """The name of a Service: it stays when the broker's pod is replaced."""
        return f"tcp://{self.broker}.{self.namespace}.svc:{CONTROL_PORT}"

    @property
    def workers(self) -> list[str]:
        return [f"island-{number}" for number in range(self.islands)]

    def metadata(self, name: str, component: str) -> Object:
        return {"name": name, "namespace": self.namespace, "labels": self.labels(component)}

    def labels(self, component: str) -> dict[str, str]:
        return {
            "app.kubernetes.io/name": "diloco",
            "app.kubernetes.io/instance": self.name,
            "app.kubernetes.io/component": component,
        }
