"""The objects of the broker: one pod that lives again, with its disk, its names and its keys."""

from __future__ import annotations

import base64
import shlex

from diloco_tools.launch.commands import MONITOR
from diloco_tools.launch.kubernetes.run import (
    CONTROL_PORT,
    FEED_PORT,
    KEYS,
    METRICS_PORT,
    KubernetesRun,
    Object,
    as_one_user,
    container,
    keys_of_its_own,
    plain,
    resources,
    volumes_of_keys,
)

DATA = "/data"
# A pod of a StatefulSet is always started again, so after the end of the run (3, or 0 without a signal)
# it stays, with the final model, until somebody deletes it.
SERVE = """\
told=
{serve} &
child=$!
trap 'told=1; kill -TERM $child' TERM
wait $child; code=$?
while kill -0 $child 2>/dev/null; do wait $child; code=$?; done
[ -n "$told" ] && exit $code
case $code in 0|3) ;; *) exit $code ;; esac
echo "The run is over; its model is in {data}/run. Delete the StatefulSet when you have it."
trap 'exit 0' TERM
while :; do sleep 1; done
"""


def broker_objects(run: KubernetesRun) -> list[Object]:
    return [_secret(run), *_services(run), _stateful_set(run), _budget(run), _monitor(run)]


def serve_options(run: KubernetesRun) -> list[str]:
    """All of them: those of the launcher come first, so that the user's count."""
    own = {
        "--workers": str(run.islands),
        "--keys": f"{KEYS}/run/broker",
        "--bind": f"tcp://0.0.0.0:{CONTROL_PORT}",
        "--feed": f"tcp://0.0.0.0:{FEED_PORT}",
        "--save-dir": f"{DATA}/run",
    }
    return [word for pair in own.items() for word in pair] + list(run.serve)


def _secret_files(run: KubernetesRun) -> dict[str, str]:
    """Where each key is in the pod, by its file: those of the broker's folder, and that of a monitor."""
    allowed = sorted((run.keys / "allowed").glob("*/*.pub"))
    files = {"broker.key": "broker/broker.key"}
    files |= {
        str(each.relative_to(run.keys)): f"broker/{each.relative_to(run.keys)}" for each in allowed
    }
    return files | {f"clients/monitor-{MONITOR}.key": f"monitor-{MONITOR}.key"}


def _key(file: str) -> str:
    """The name of a file among the data of a Secret, which knows no folders."""
    return file.replace("/", ".")


def _secret(run: KubernetesRun) -> Object:
    data = {
        _key(file): base64.b64encode((run.keys / file).read_bytes()).decode()
        for file in _secret_files(run)
    }
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": run.metadata(f"{run.broker}-keys", "broker"),
        "type": "Opaque",
        "data": data,
    }


def _services(run: KubernetesRun) -> list[Object]:
    """One address that stays, and the names of the pod that a StatefulSet wants."""
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
    # Of the exporter beside it; a name of a port would be one of the broker's own container.
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
    """A node with the broker is not emptied on the way; delete this to allow it."""
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
