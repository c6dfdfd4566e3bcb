"""What a run on Kubernetes is made from, and what all of its objects have in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONTROL_PORT, FEED_PORT, METRICS_PORT, MEETING_PORT = 8512, 8513, 9512, 29400
# The user of the images' containers: any but root, and the same everywhere, so that keys are its own.
USER = 10001
KEYS = "/keys"  # a folder in memory; what is in it belongs to that user alone
SECRET = (
    "/secret"  # the same as Kubernetes hands it out: readable by a group, which keys must not be
)

Object = dict[str, Any]


@dataclass(frozen=True)
class KubernetesRun:
    """A run, by the words of the command line.

    Attributes:
        name: of the run, and the beginning of the names of all objects; a DNS label.
        keys: folder of keys that `make_keys` has filled.
        broker_image, worker_image: of the Dockerfile's targets `broker` and `worker`.
        command: what starts the training in each pod of an island.
        islands, nodes: how many workers, and of how many pods each.
        gpus: of each pod of an island.
        grace: seconds between SIGTERM and SIGKILL.
        restarts: of an island's processes in their pod; `replacements` of its pods.
        serve: options of `diloco-broker serve`.
    """

    name: str
    keys: Path
    broker_image: str
    worker_image: str
    command: tuple[str, ...]
    islands: int
    nodes: int = 1
    namespace: str = "default"
    gpus: int = 0
    storage: str = "20Gi"
    storage_class: str | None = None
    broker_cpu: str = "2"
    broker_memory: str = "8Gi"
    worker_cpu: str = "4"
    worker_memory: str = "16Gi"
    grace: int = 120
    restarts: int = 3
    replacements: int = 100
    serve: tuple[str, ...] = field(default=())

    @property
    def broker(self) -> str:
        return f"{self.name}-broker"

    @property
    def server(self) -> str:
        """A name that stays when the broker's pod is another: that of a Service."""
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


def container(name: str, image: str, **more: Any) -> Object:
    """One that may do nothing but run."""
    allowed = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    return {"name": name, "image": image, "securityContext": allowed, **more}


def plain(word: str) -> str:
    """A word of a command that Kubernetes leaves as it is: it reads `$(NAME)` as a variable."""
    return word.replace("$(", "$$(")


def as_one_user() -> Object:
    """The securityContext of a pod."""
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def keys_of_its_own(image: str) -> Object:
    """The container that begins a pod: it copies keys to where they belong to its user alone."""
    copy = f"umask 077 && mkdir -p {KEYS}/run && cp -rLf {SECRET}/* {KEYS}/run/"
    mounts = [{"name": "secret", "mountPath": SECRET}, {"name": "keys", "mountPath": KEYS}]
    return container("keys", image, command=["sh", "-c", copy], volumeMounts=mounts)


def volumes_of_keys(secret: Object) -> list[Object]:
    memory = {"emptyDir": {"medium": "Memory", "sizeLimit": "16Mi"}}
    return [{"name": "secret", "secret": secret}, {"name": "keys", **memory}]


def resources(cpu: str, memory: str, gpus: int = 0) -> Object:
    """What is asked for is what there may be, of memory; of processor time there may be more."""
    more = {"nvidia.com/gpu": gpus} if gpus else {}
    return {
        "requests": {"cpu": cpu, "memory": memory, **more},
        "limits": {"memory": memory, **more},
    }
