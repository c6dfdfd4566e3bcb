"""The objects of an island: a JobSet of its own, which restarts alone, and the one key of its worker."""

from __future__ import annotations

import base64

from diloco_tools.launch.kubernetes.run import (
    KEYS,
    MEETING_PORT,
    KubernetesRun,
    Object,
    as_one_user,
    container,
    keys_of_its_own,
    plain,
    resources,
    volumes_of_keys,
)

JOB = "node"  # of the one replicated job; in the names of pods


def island_objects(run: KubernetesRun, number: int) -> list[Object]:
    return [_secret(run, number), _job_set(run, number)]


def _name(run: KubernetesRun, number: int) -> str:
    return f"{run.name}-{run.workers[number]}"


def _secret(run: KubernetesRun, number: int) -> Object:
    file = run.keys / "clients" / f"worker-{run.workers[number]}.key"
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": run.metadata(f"{_name(run, number)}-key", "island"),
        "type": "Opaque",
        "data": {"worker.key": base64.b64encode(file.read_bytes()).decode()},
    }


def _variables(run: KubernetesRun, number: int) -> list[Object]:
    """By which the worker finds its run, and torchrun the other pods of the island."""
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
        "PET_RDZV_ENDPOINT": f"{first}:{MEETING_PORT}",
        "PET_RDZV_ID": name,
        "PET_TEE": "3",
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": f"[{worker} rank ${{rank}}]: ",
    }
    return [{"name": name, "value": value} for name, value in values.items()]


def _job_set(run: KubernetesRun, number: int) -> Object:
    name = _name(run, number)
    # A node of several cannot be started again by itself: the others are in the middle of a step.
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
            {"name": "shm", "emptyDir": {"medium": "Memory"}},  # data loaders want more than 64 MB
        ],
    }
    job = {
        "parallelism": run.nodes,
        "completions": run.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,  # a pod that fails is an island that starts anew, as a whole
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
