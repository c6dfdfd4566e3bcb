"""The objects of a run on Kubernetes: one pod of the broker with its disk, names and keys, and for each
island a JobSet of its own, which restarts independently, with the one key of its worker.
"""

from __future__ import annotations

import base64
import shlex
from pathlib import Path
from typing import Any

from diloco_tools.launch.commands import MONITOR
from diloco_tools.launch.kubernetes.run import (
    CONTROL_PORT,
    FEED_PORT,
    METRICS_PORT,
    RENDEZVOUS_PORT,
    KubernetesRun,
    Object,
)

# The user in the containers: any but root, and the same in both images, so that it owns its keys.
USER = 10001
KEYS = "/keys"  # a folder in memory that only that user can read
SECRET = "/secret"  # as Kubernetes mounts it: readable by a group, which our key files must not be
JOB = "node"  # the one replicated job; part of the names of pods
DATA = "/data"
# Kubernetes always restarts a pod of a StatefulSet. So after the end of the run (exit code 3, or 0
# without a signal) the pod keeps running, with the final model, until the StatefulSet is deleted.
SERVE = """\
stopped=
{serve} &
child=$!
trap 'stopped=1; kill -TERM $child' TERM
wait $child; code=$?
while kill -0 $child 2>/dev/null; do wait $child; code=$?; done
[ -n "$stopped" ] && exit $code
case $code in 0|3) ;; *) exit $code ;; esac
echo "The run is over; its model is in {data}/run. Delete the StatefulSet when you have it."
trap 'exit 0' TERM
while :; do sleep 1; done
"""


def objects_of(run: KubernetesRun) -> list[Object]:
    """The broker's, then those of each island."""
    found = [_broker_keys(run), *_services(run), _stateful_set(run), _budget(run), _monitor(run)]
    for number in range(run.islands):
        found += [_island_key(run, number), _job_set(run, number)]
    return found


def serve_options(run: KubernetesRun) -> list[str]:
    """The launcher's options, then the user's, which override them."""
    own = {
        "--workers": str(run.islands),
        "--keys": f"{KEYS}/run/broker",
        "--bind": f"tcp://0.0.0.0:{CONTROL_PORT}",
        "--feed": f"tcp://0.0.0.0:{FEED_PORT}",
        "--save-dir": f"{DATA}/run",
    }
    return [word for pair in own.items() for word in pair] + list(run.serve)


def _secret_files(run: KubernetesRun) -> dict[str, str]:
    """The path of each key in the pod, by its file: the broker's folder, and the key of a monitor."""
    allowed = sorted((run.keys / "allowed").glob("*/*.pub"))
    files = {"broker.key": "broker/broker.key"}
    files |= {
        str(each.relative_to(run.keys)): f"broker/{each.relative_to(run.keys)}" for each in allowed
    }
    return files | {f"clients/monitor-{MONITOR}.key": f"monitor-{MONITOR}.key"}


def _key(file: str) -> str:
    """The key of a file in the data of a Secret, which has no folders."""
    return file.replace("/", ".")


def _secret(metadata: Object, files: dict[str, Path]) -> Object:
    data = {key: base64.b64encode(file.read_bytes()).decode() for key, file in files.items()}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata,
        "type": "Opaque",
        "data": data,
    }


def _broker_keys(run: KubernetesRun) -> Object:
    files = {_key(file): run.keys / file for file in _secret_files(run)}
    return _secret(run.metadata(f"{run.broker}-keys", "broker"), files)


def _services(run: KubernetesRun) -> list[Object]:
    """A stable address, and the headless Service that a StatefulSet requires."""
    ports = [
        {"name": "control", "port": CONTROL_PORT, "targetPort": "control"},
        {"name": "feed", "port": FEED_PORT, "targetPort": "feed"},
    ]
    usual = {"selector": run.labels("broker"), "ports": ports}
    headless = {**usual, "clusterIP": "None"}
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": run.metadata(name, "broker"),
            "spec": spec,
        }
        for name, spec in ((run.broker, usual), (f"{run.broker}-pods", headless))
    ]


def _stateful_set(run: KubernetesRun) -> Object:
    # Of the exporter beside it, by number: a port name refers to the broker's own container.
    health = {"httpGet": {"path": "/healthz", "port": METRICS_PORT}, "periodSeconds": 10}
    keys_folder = {"name": "keys", "mountPath": KEYS, "readOnly": True}
    serve = shlex.join(["diloco-broker", "serve", *serve_options(run)])
    broker = container(
        "broker",
        run.broker_image,
        command=["sh", "-c", plain(SERVE.format(serve=serve, data=DATA))],
        ports=[
            {"name": "control", "containerPort": CONTROL_PORT},
            {"name": "feed", "containerPort": FEED_PORT},
        ],
        volumeMounts=[keys_folder, {"name": "data", "mountPath": DATA}],
        resources=resources(run.broker_cpu, run.broker_memory),
        startupProbe={**health, "failureThreshold": 60},
        livenessProbe={**health, "failureThreshold": 3},
    )
    exporter = container(
        "exporter",
        run.broker_image,
        command=["diloco-exporter", "--feed", f"tcp://127.0.0.1:{FEED_PORT}", "--host", "0.0.0.0"],
        args=[
            "--insecure",
            "--port",
            str(METRICS_PORT),
            "--keys",
            f"{KEYS}/run/monitor-{MONITOR}.key",
        ],
        ports=[{"name": "metrics", "containerPort": METRICS_PORT}],
        volumeMounts=[keys_folder],
        resources=resources("100m", "256Mi"),
    )
    items = [{"key": _key(file), "path": path} for file, path in _secret_files(run).items()]
    pod = {
        "terminationGracePeriodSeconds": run.grace,
        "securityContext": as_one_user(),
        "automountServiceAccountToken": False,
        "initContainers": [keys_of_its_own(run.broker_image)],
        "containers": [broker, exporter],
        "volumes": volumes_of_keys({"secretName": f"{run.broker}-keys", "items": items}),
    }
    claim: Object = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": run.storage}},
    }
    if run.storage_class is not None:
        claim["storageClassName"] = run.storage_class
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": run.metadata(run.broker, "broker"),
        "spec": {
            "replicas": 1,
            "serviceName": f"{run.broker}-pods",
            "selector": {"matchLabels": run.labels("broker")},
            "template": {"metadata": {"labels": run.labels("broker")}, "spec": pod},
            "volumeClaimTemplates": [
                {"metadata": {"name": "data", "labels": run.labels("broker")}, "spec": claim}
            ],
        },
    }


def _budget(run: KubernetesRun) -> Object:
    """A drain does not evict the broker; delete this object to allow it."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": run.metadata(run.broker, "broker"),
        "spec": {"minAvailable": 1, "selector": {"matchLabels": run.labels("broker")}},
    }


def _monitor(run: KubernetesRun) -> Object:
    """For the Prometheus operator."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": run.metadata(run.broker, "broker"),
        "spec": {
            "selector": {"matchLabels": run.labels("broker")},
            "podMetricsEndpoints": [{"port": "metrics", "path": "/metrics", "interval": "15s"}],
        },
    }


def _name(run: KubernetesRun, number: int) -> str:
    return f"{run.name}-{run.workers[number]}"


def _island_key(run: KubernetesRun, number: int) -> Object:
    file = run.keys / "clients" / f"worker-{run.workers[number]}.key"
    return _secret(run.metadata(f"{_name(run, number)}-key", "island"), {"worker.key": file})


def _variables(run: KubernetesRun, number: int) -> list[Object]:
    """The worker finds its run by them, and torchrun the other pods of the island."""
    name, worker = _name(run, number), run.workers[number]
    first = f"{name}-{JOB}-0-0.{name}"
    values = {
        "DILOCO_SERVER": run.server,
        "DILOCO_WORKER_ID": worker,
        "DILOCO_KEYS": f"{KEYS}/run/worker.key",
        "DILOCO_SHARD_INDEX": str(number),
        "DILOCO_NUM_SHARDS": str(run.islands),
        "PET_NNODES": str(run.nodes),
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": f"{first}:{RENDEZVOUS_PORT}",
        "PET_RDZV_ID": name,
        "PET_TEE": "3",
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": f"[{worker} rank ${{rank}}]: ",
    }
    return [{"name": name, "value": value} for name, value in values.items()]


def _job_set(run: KubernetesRun, number: int) -> Object:
    name = _name(run, number)
    # One node of several cannot be restarted alone: the others are in the middle of a step.
    restarts = run.restarts if run.nodes == 1 else 0
    launcher = ["diloco-worker", "run", "--over-is-success", "--restarts", str(restarts), "--"]
    worker = container(
        "worker",
        run.worker_image,
        command=launcher,
        args=[plain(word) for word in run.command],
        env=_variables(run, number),
        volumeMounts=[
            {"name": "keys", "mountPath": KEYS, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
        resources=resources(run.worker_cpu, run.worker_memory, run.gpus),
    )
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": run.grace,
        "securityContext": as_one_user(),
        "automountServiceAccountToken": False,
        "initContainers": [keys_of_its_own(run.worker_image)],
        "containers": [worker],
        "volumes": [
            *volumes_of_keys({"secretName": f"{name}-key"}),
            {"name": "shm", "emptyDir": {"medium": "Memory"}},  # data loaders need more than 64 MB
        ],
    }
    job = {
        "parallelism": run.nodes,
        "completions": run.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,  # if one pod fails, the whole island restarts
        "template": {"metadata": {"labels": run.labels("island")}, "spec": pod},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": run.metadata(name, "island"),
        "spec": {
            "failurePolicy": {"maxRestarts": run.replacements},
            "network": {"enableDNSHostnames": True, "subdomain": name},
            "replicatedJobs": [{"name": JOB, "replicas": 1, "template": {"spec": job}}],
        },
    }


def container(name: str, image: str, **more: Any) -> Object:
    """A container without privileges."""
    allowed = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    return {"name": name, "image": image, "securityContext": allowed, **more}


def plain(word: str) -> str:
    """Escape an argument of a command: Kubernetes expands `$(NAME)` as a variable."""
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
    """An init container that copies the keys into files that only our user can read."""
    copy = f"umask 077 && mkdir -p {KEYS}/run && cp -rLf {SECRET}/* {KEYS}/run/"
    mounts = [{"name": "secret", "mountPath": SECRET}, {"name": "keys", "mountPath": KEYS}]
    return container("keys", image, command=["sh", "-c", copy], volumeMounts=mounts)


def volumes_of_keys(secret: Object) -> list[Object]:
    memory = {"emptyDir": {"medium": "Memory", "sizeLimit": "16Mi"}}
    return [{"name": "secret", "secret": secret}, {"name": "keys", **memory}]


def resources(cpu: str, memory: str, gpus: int = 0) -> Object:
    """Memory is limited to its request; CPU time is not limited."""
    more = {"nvidia.com/gpu": gpus} if gpus else {}
    return {
        "requests": {"cpu": cpu, "memory": memory, **more},
        "limits": {"memory": memory, **more},
    }
