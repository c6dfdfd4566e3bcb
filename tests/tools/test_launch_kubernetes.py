"""What `diloco-launch kubernetes` prints: checked against schemas, and its commands run here.

The objects of Kubernetes itself are checked strictly, by `kubernetes-validate`, and so is the Job within
a JobSet. A JobSet and a PodMonitor are of other projects: the stored manifest has their fields. None of
it has been run on a cluster.
"""

import base64
import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from diloco_tools.launch.commands import make_keys
from diloco_tools.launch.kubernetes.cli import as_yaml
from diloco_tools.launch.kubernetes.objects import objects_of
from diloco_tools.launch.kubernetes.run import LABEL, KubernetesRun
from diloco_worker import DiLoCoClient
from kit.process_kit import Processes, execute

SNAPSHOT = Path(__file__).parent / "snapshots" / "kubernetes.yaml"
VERSIONS = ("1.29", "1.33")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "keys"
    make_keys(folder, [f"island-{number}" for number in range(3)])
    return folder


def a_run(keys: Path, **given: Any) -> KubernetesRun:
    usual: dict[str, Any] = {
        "name": "llama",
        "keys": keys,
        "broker_image": "registry.example/diloco-broker:1",
        "worker_image": "registry.example/llama:1",
        "command": ("torchrun", "--nproc-per-node=8", "train.py"),
        "islands": 2,
        "serve": ("--sync-every", "500", "--max-rounds", "200"),
    }
    return KubernetesRun(**{**usual, **given})


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [each for each in objects if each["kind"] == kind]


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"nodes": 4, "gpus": 8, "namespace": "research", "islands": 3},
        {"storage_class": "fast", "command": ("sh", "-c", "echo $(HOSTNAME) {x} 'y'")},
    ],
)
def test_objects_are_what_kubernetes_takes(keys: Path, given: dict[str, Any]) -> None:
    run = a_run(keys, **given)
    objects = list(yaml.safe_load_all(as_yaml(run)))
    assert objects == objects_of(run)
    for each in objects:
        if each["kind"] == "JobSet":
            template = each["spec"]["replicatedJobs"][0]["template"]
            job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **template}
            for version in VERSIONS:
                kubernetes_validate.validate(job, version, strict=True)
        elif each["kind"] != "PodMonitor":
            for version in VERSIONS:
                kubernetes_validate.validate(each, version, strict=True)
    assert len({(each["kind"], each["metadata"]["name"]) for each in objects}) == len(objects)
    assert len(of_kind(objects, "JobSet")) == run.islands


def test_names_of_ports_are_those_of_the_container_that_says_them(keys: Path) -> None:
    """No schema knows that a probe looks a name up in its own container."""
    for kind in ("StatefulSet", "JobSet"):
        for each in pod_of(objects_of(a_run(keys)), kind)["containers"]:
            own = {port["name"] for port in each.get("ports", [])}
            probes = [each[name] for name in each if name.endswith("Probe")]
            asked = {probe["httpGet"]["port"] for probe in probes}
            assert {port for port in asked if isinstance(port, str)} <= own


@given(name=st.from_regex(LABEL, fullmatch=True), number=st.integers(0, 9999))
def test_names_of_pods_can_be_looked_up(name: str, number: int) -> None:
    host = f"{name}-island-{number}-node-0-99"
    assert len(host) <= 63
    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", host)


def test_each_pod_has_the_keys_that_it_needs_and_no_other(keys: Path) -> None:
    objects = objects_of(a_run(keys))
    secrets = {each["metadata"]["name"]: each["data"] for each in of_kind(objects, "Secret")}
    clients = keys / "clients"
    for number in (0, 1):
        own = (clients / f"worker-island-{number}.key").read_bytes()
        data = secrets[f"llama-island-{number}-key"]
        assert [base64.b64decode(value) for value in data.values()] == [own]
    of_broker = {base64.b64decode(value) for value in secrets["llama-broker-keys"].values()}
    assert (clients / "monitor-display.key").read_bytes() in of_broker
    assert (clients / "operator-launcher.key").read_bytes() not in of_broker
    shown = yaml.safe_dump_all([each for each in objects if each["kind"] != "Secret"])
    for key in keys.rglob("*.key"):
        for secret in re.findall(r"[^\s\"':,{}]{30,}", key.read_text()):
            assert secret not in shown


def test_manifest_is_this_one(keys: Path) -> None:
    text = as_yaml(a_run(keys, nodes=2, gpus=8))
    text = re.sub(r"(?m)^(  [\w.-]+): [A-Za-z0-9+/=]{20,}$", r"\1: KEY", text)
    text = re.sub(r"(?m)^(  [\w.-]+): \S*\n?(?:    [A-Za-z0-9+/=]+\n)+", r"\1: KEY\n", text)
    if os.environ.get("UPDATE"):
        SNAPSHOT.write_text(text)
    assert text == SNAPSHOT.read_text()


def as_mounted(secret: dict[str, Any], pod: dict[str, Any], folder: Path) -> None:
    """A secret as Kubernetes lays it out: links to a folder with a date, readable by the group."""
    volume = next(each for each in pod["volumes"] if each["name"] == "secret")["secret"]
    data = secret["data"]
    paths = {item["key"]: item["path"] for item in volume.get("items", [])} or {k: k for k in data}
    real = folder / "..2026_01_01"
    for key, path in paths.items():
        file = real / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(base64.b64decode(data[key]))
        file.chmod(0o440)
    (folder / "..data").symlink_to(real.name)
    for top in {Path(path).parts[0] for path in paths.values()}:
        (folder / top).symlink_to(Path("..data") / top)


def made_here(words: list[str], folder: Path) -> list[str]:
    """A command of a container, with the folders of the container in one of this machine."""
    found = []
    for word in words:
        local = re.sub(r"(?<![\w.])/(keys|secret|data)\b", rf"{folder}/\1", word)
        local = re.sub(r"tcp://0\.0\.0\.0:\d+", "tcp://127.0.0.1:*", local)
        serve = f"{sys.executable} -m diloco_broker serve"
        found.append(local.replace("diloco-broker serve", serve))
    return found


def pod_of(objects: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    spec = of_kind(objects, kind)[0]["spec"]
    if kind == "JobSet":
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    pod: dict[str, Any] = spec["template"]["spec"]
    return pod


def lay_out(objects: list[dict[str, Any]], kind: str, secret: str, folder: Path) -> dict[str, Any]:
    """What the init container of a pod leaves behind, in a folder. Returns the pod."""
    pod = pod_of(objects, kind)
    for name in ("keys", "secret", "data"):
        (folder / name).mkdir(parents=True)
    (folder / "keys").chmod(0o777)  # as an emptyDir is
    found = next(each for each in of_kind(objects, "Secret") if each["metadata"]["name"] == secret)
    as_mounted(found, pod, folder / "secret")
    subprocess.run(made_here(pod["initContainers"][0]["command"], folder), check=True, timeout=20)
    return pod


@pytest.mark.slow
def test_commands_of_the_pods_make_a_run(keys: Path, processes: Processes, tmp_path: Path) -> None:
    """The broker's script, with the keys as its pod has them; an island's key lets its worker in."""
    run = a_run(keys, islands=1, serve=("--sync-every", "5", "--max-rounds", "20"))
    folder = tmp_path / "broker"
    pod = lay_out(objects_of(run), "StatefulSet", "llama-broker-keys", folder)
    broker = processes.start(execute, *made_here(pod["containers"][0]["command"], folder))
    address = broker.address()
    copied = [path for path in (folder / "keys" / "run").rglob("*") if path.is_file()]
    assert len(copied) >= 5
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o077 == 0 for path in copied)
    island = lay_out(objects_of(run), "JobSet", "llama-island-0-key", tmp_path / "island")
    variables = {each["name"]: each["value"] for each in island["containers"][0]["env"]}
    assert variables["DILOCO_SERVER"] == "tcp://llama-broker.default.svc:8512"
    key = made_here([variables["DILOCO_KEYS"]], tmp_path / "island")[0]
    with DiLoCoClient(address, keys=key, timeout=30.0) as client:
        assert "run" in client.status()
    worker = processes.train("island-0", address, 1000, DILOCO_KEYS=key)
    broker.says("The run is over; its model is in")
    assert worker.ends() == 0, worker.output
    assert (folder / "data" / "run" / "final-model.safetensors").exists()
    assert broker.process.is_alive(), "its pod keeps running"
    broker.gets(signal.SIGTERM)
    assert broker.ends() == 0
