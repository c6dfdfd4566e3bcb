"""The output of a script with a worker: log lines and uncaught errors, in real processes."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco_broker import Broker
from kit.process_kit import PATIENCE_S, Child, Processes
from kit.whole_run import make_config

# Two rounds; in between the script configures logging, if an argument says so.
TRAIN = """
import logging, sys, torch
from diloco_worker import DiLoCoWorker
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def round():
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
with DiLoCoWorker(model, optimizer, server=sys.argv[1], worker_id="w") as diloco:
    round()
    print("ROUND", flush=True)
    if len(sys.argv) > 2:
        logging.basicConfig(format="APP %(message)s", level=sys.argv[2])
    round()
    logging.getLogger("diloco.worker").warning("WATCH OUT")
print("DONE", diloco.sync_count, flush=True)
"""
# Python handles the last error itself, and passes the others to the hook for uncaught ones.
FAIL = """
import os, sys, torch
from diloco_worker import DiLoCoWorker
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
previous, seen = sys.excepthook, []
sys.excepthook = lambda *error: (seen.append(error[0].__name__), previous(*error))
for level in ("off", "debug"):
    os.environ["DILOCO_LOG"] = level
    print("LEVEL", level, file=sys.stderr, flush=True)
    try:
        DiLoCoWorker(model, optimizer, sync_evry=5)
    except Exception:
        sys.excepthook(*sys.exc_info())
os.environ["DILOCO_LOG"] = "off"
print("LEVEL", *seen, file=sys.stderr, flush=True)
def train():
    with DiLoCoWorker(model, optimizer, server=sys.argv[1], LAST):
        pass
train()
"""


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker(make_config(workers=1, sync_every=2)) as made:
        yield made


def trains(processes: Processes, broker: Broker, *level: str, **env: str) -> list[str]:
    """The output of a training script, by line."""
    path = processes.folder / "train.py"
    path.write_text(TRAIN)
    child: Child = processes.run(str(path), broker.address, *level, **env)
    assert child.ends() == 0, child.output
    assert "DONE 2" in child.output
    return child.output.splitlines()


def test_joining_and_rounds_are_printed_once(processes: Processes, broker: Broker) -> None:
    lines = trains(processes, broker, "INFO")
    place = lines.index("ROUND")
    assert len([line for line in lines[:place] if "Joined the run" in line]) == 1
    assert len([line for line in lines if "Synchronised" in line]) == 2
    assert [line for line in lines if "WATCH OUT" in line] == ["APP WATCH OUT"]
    assert not [line for line in lines[:place] if line.startswith("APP")]


@pytest.mark.parametrize(("level", "warnings"), [("warning", 1), ("off", 0)])
def test_log_variable_sets_what_is_printed(
    processes: Processes, broker: Broker, level: str, warnings: int
) -> None:
    lines = trains(processes, broker, DILOCO_LOG=level)
    assert not [line for line in lines if "Joined" in line or "Synchronised" in line]
    assert len([line for line in lines if "WATCH OUT" in line]) == warnings


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "last", "code", "words"),
    [
        # Launchers do not restart after this code: a restart cannot repair wrong usage.
        ((), "sync_evry=7", 2, "did you mean sync_every?"),
        (("-m", "diloco_worker.auto"), "sync_every=7", 1, "Refused: "),
    ],
    ids=["alone", "auto"],
)
def test_uncaught_error_shows_the_script_alone(
    broker: Broker, tmp_path: Path, options: tuple[str, ...], last: str, code: int, words: str
) -> None:
    path = tmp_path / "fail.py"
    path.write_text(FAIL.replace("LAST", last))
    ended = subprocess.run(
        [sys.executable, *options, str(path), broker.address],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == code, ended.stderr
    _, short, whole, uncaught = ended.stderr.split("LEVEL")
    assert "did you mean sync_every?" in short.splitlines()[-1]
    assert "did you mean sync_every?" in whole.splitlines()[-1]
    assert words in uncaught.splitlines()[-1]
    assert "fail.py" in short and "fail.py" in uncaught, "the script's own lines are shown"
    assert "diloco_worker/" not in short + uncaught
    assert "diloco_worker/" in whole
    assert uncaught.startswith(" UsageError UsageError\n"), "another hook still sees each error"
