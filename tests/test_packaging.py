"""What is around the packages: images, workflows, the board for Grafana."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from kit.exporter_scrapes import METRICS
from kit.paths import ROOT
from kit.tiers import MINUTES

DOCKERFILE = (ROOT / "Dockerfile").read_text()
PROJECT = (ROOT / "pyproject.toml").read_text()
COMMANDS = dict(re.findall(r"^(diloco-\S+) = \"(\S+):app\"$", PROJECT, re.MULTILINE))
ALERTS = yaml.safe_load((ROOT / "tools" / "prometheus-alerts.yml").read_text())
BOARD = json.loads((ROOT / "tools" / "grafana-board.json").read_text())
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def stages() -> dict[str, list[list[str]]]:
    """The instructions of each stage of the Dockerfile, by its name."""
    found: dict[str, list[list[str]]] = {"": []}
    name = ""
    text = re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE).replace("\\\n", " ")
    for line in filter(None, text.splitlines()):
        words = line.split()
        if words[0] == "FROM":
            assert words[2] == "AS", "each stage has a name"
            name = words[3]
            found[name] = []
        found[name].append(words)
    return found


@pytest.mark.parametrize("target", ["broker", "worker"])
def test_image_runs_a_command_of_ours_and_not_as_root(target: str) -> None:
    stage = stages()[target]
    (entry,) = (json.loads(" ".join(words[1:])) for words in stage if words[0] == "ENTRYPOINT")
    assert entry == [f"diloco-{target}"] and entry[0] in COMMANDS
    users = [words[1] for words in stage if words[0] == "USER"]
    assert users and users[-1] != "root"


def test_images_are_made_of_what_there_is() -> None:
    for name, stage in stages().items():
        for instruction, *words in stage:
            if instruction == "COPY" and not words[0].startswith("--from="):
                for source in words[:-1]:
                    assert (ROOT / source).exists(), f"{name} copies {source}"
            elif instruction == "COPY":
                assert words[0].removeprefix("--from=") in stages()
            elif instruction == "FROM" and name in ("broker", "worker"):
                assert words[0] in stages()
    needed = re.findall(r"^    \"(\w+)/diloco_\w+\",$", PROJECT, re.MULTILINE)
    copied = [words[1] for words in stages()["wheel"] if words[0] == "COPY"]
    assert set(needed) <= set(copied)


def has_docker() -> bool:
    if shutil.which("docker") is None:
        return False
    try:
        asked = subprocess.run(["docker", "info"], check=False, capture_output=True, timeout=20)
    except subprocess.TimeoutExpired:
        return False
    return asked.returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not has_docker(), reason="there is no docker here that builds")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("target", ["broker", "worker"])
def test_image_can_be_built_and_says_its_options(target: str) -> None:
    def docker(*words: str) -> str:
        command = ["docker", *words]
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        return done.stdout

    image = docker("build", "--quiet", "--target", target, ".").strip()
    assert "Usage" in docker("run", "--rm", image, "--help")


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda each: str(each.stem))
def test_workflow_calls_targets_that_there_are(workflow: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = [
        word
        for line in re.findall(r"run: make (.*)", workflow.read_text())
        for word in re.sub(r"\S*\${{.*?}}\S*", "", line).split()
    ]
    assert called and set(called) <= targets
    for script in re.findall(r"run: (\.\S+)", workflow.read_text()):
        assert os.access(ROOT / script, os.X_OK)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda each: str(each.stem))
def test_job_has_twice_the_time_of_what_it_runs_and_pinned_actions(
    workflow: Path,
) -> None:
    for name, job in yaml.safe_load(workflow.read_text())["jobs"].items():
        steps = [step.get("run", "") for step in job["steps"]]
        minutes = sum(MINUTES[each] for each in MINUTES for run in steps if run.startswith(each))
        assert job["timeout-minutes"] == 10 + 2 * minutes, name  # ten for what it installs
        assert all(re.search(r"@v\d", step["uses"]) for step in job["steps"] if "uses" in step)


def queries() -> list[str]:
    """Every query of the board, those of its variables included."""
    found = [target["expr"] for panel in BOARD["panels"] for target in panel.get("targets", ())]
    return found + [
        each["query"]["query"]
        for each in BOARD["templating"]["list"]
        if isinstance(each["query"], dict)
    ]


def alerts() -> list[str]:
    return [rule["expr"] for group in ALERTS["groups"] for rule in group["rules"]]


def test_board_and_alerts_ask_for_series_and_labels_that_the_exporter_has() -> None:
    assert len(queries()) > 10
    assert "diloco_workers_alive < diloco_workers_due" in alerts()
    for query in queries() + alerts():
        names = set(re.findall(r"diloco_\w+", query))
        assert names and names <= METRICS.keys(), query
        known = {"job", "instance"} | {label for name in names for label in METRICS[name]}
        inside = re.findall(r"{([^}]*)}", query)
        asked = re.findall(r"(\w+)\s*=~?\s*\"", " ".join(inside))
        by = re.findall(r"by \(([^)]*)\)", query)
        asked += [label.strip() for each in by for label in each.split(",")]
        assert set(asked) <= known, query
