"""Units of systemd and the compose file: what they start is what there is."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kit.paths import ROOT

SERVICES = ROOT / "tools" / "services"
UNITS = sorted(SERVICES.glob("*.service"))
BIN = Path(sys.executable).parent
COMPOSE: dict[str, Any] = yaml.safe_load((SERVICES / "compose.yaml").read_text())["services"]
PAGE = (ROOT / "docs" / "deploying.md").read_text()


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """As the page makes them."""
    line = re.search(r"^    (diloco-broker keygen keys .*)$", PAGE, re.MULTILINE)
    assert line is not None
    run(shlex.split(line[1]), tmp_path)
    return tmp_path / "keys"


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    program = str(BIN / words[0]) if words[0].startswith("diloco-") else words[0]
    done = subprocess.run(
        [program, *words[1:]], cwd=folder, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done
    return done


def start_of(unit: Path) -> list[str]:
    line = re.search(r"^ExecStart=(.*)$", unit.read_text(), re.MULTILINE)
    assert line is not None
    return shlex.split(line[1].replace("/opt/diloco/bin/", "").replace("%i", "gpu-0"))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: str(unit.stem))
def test_systemd_takes_the_unit(unit: Path, tmp_path: Path) -> None:
    name = unit.name.replace("@", "@gpu-0")
    text = unit.read_text().replace("/opt/diloco/bin", str(BIN)).replace("User=diloco", "User=root")
    (tmp_path / name).write_text(text)
    words = ["systemd-analyze", "verify", "--man=no", str(tmp_path / name)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    about_it = [line for line in done.stderr.splitlines() if name in line or "Unknown" in line]
    assert about_it == []


@pytest.mark.slow
def test_broker_of_the_unit_starts_with_what_the_page_says(keys: Path) -> None:
    given = re.search(r"DILOCO_SERVE=(.*)' >", PAGE)
    assert given is not None
    words = start_of(SERVICES / "diloco-broker.service")
    assert words.pop() == "$DILOCO_SERVE"
    words[words.index("/etc/diloco/keys")] = str(keys)
    assert "valid" in run([*words, *shlex.split(given[1]), "--check"], keys.parent).stdout


@pytest.mark.slow
def test_worker_of_the_unit_starts_its_script_with_its_key(keys: Path) -> None:
    words = start_of(SERVICES / "diloco-worker@.service")
    assert words.pop() == "$DILOCO_TRAIN"
    own = keys / "clients" / "worker-gpu-0.key"
    words[words.index("/etc/diloco/worker-gpu-0.key")] = str(own)
    words[2:2] = ["--server", "tcp://10.0.0.1:8512"]
    told = run([*words, "env"], keys.parent).stdout
    assert f"DILOCO_KEYS={own}" in told
    assert "DILOCO_WORKER_ID=gpu-0" in told


@pytest.mark.slow
def test_broker_of_the_compose_file_starts(keys: Path) -> None:
    broker = COMPOSE["broker"]
    words = ["diloco-broker", *broker["command"], "--check"]
    words[words.index("/keys")] = str(keys)
    assert "valid" in run(words, keys.parent).stdout
    assert "./keys:/keys:ro" in broker["volumes"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpu-0", "gpu-1"])
def test_worker_of_the_compose_file_has_its_one_key(keys: Path, name: str) -> None:
    worker = COMPOSE[name]
    mounted = next(each for each in worker["volumes"] if each.endswith(":/key:ro"))
    own = keys.parent / mounted.removesuffix(":/key:ro")
    assert own.is_file()
    words = ["diloco-worker", *worker["command"]]
    words[words.index("/key")] = str(own)
    at = words.index("--")
    assert f"DILOCO_WORKER_ID={name}" in run([*words[: at + 1], "env"], keys.parent).stdout


def test_metrics_of_the_compose_file_have_their_key(keys: Path) -> None:
    metrics = COMPOSE["metrics"]
    mounted = next(each for each in metrics["volumes"] if each.endswith(":/key:ro"))
    assert (keys.parent / mounted.removesuffix(":/key:ro")).is_file()
    words = [*metrics["entrypoint"], *metrics["command"]]
    options = [word for word in words if word.startswith("--")]
    shown = run([words[0], "--help"], keys.parent).stdout
    assert all(option in shown for option in options)
