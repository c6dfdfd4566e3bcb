"""The worker's log of its pushes: its content, its order, and whether it survives the worker."""

import json
from pathlib import Path
from typing import Any

import pytest

from diloco_broker import Broker
from diloco_protocol import UsageError, VersionId
from diloco_protocol.messages import Push
from diloco_worker import DiLoCoClient, DiLoCoWorker
from kit.paths import KIT
from kit.process_kit import Processes
from kit.scripted_broker import Descent, ScriptedBroker, version
from kit.scripted_training import H, ScriptedTraining
from kit.whole_run import make_config

pytest_plugins = ("kit.worker_fixtures",)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def of_kind(path: Path, event: str) -> list[dict[str, Any]]:
    return [line for line in lines(path) if line["event"] == event]


def name(what: VersionId) -> list[Any]:
    return [what.run, what.counter, f"{what.tag:016x}"]


def test_freeze_is_logged_before_its_push_is_sent_and_then_its_outcome(
    training: ScriptedTraining, broker: ScriptedBroker, tmp_path: Path
) -> None:
    path = tmp_path / "audit.jsonl"
    training.begins(options={"audit": str(path)})
    for step in (H, 2 * H):
        training.trains(H)
        push = broker.hears(Push)
        of_push = {"worker": "me", "push_id": f"{push.push_id:016x}", "fragment": 0}
        base = {"base": name(version(0)), "steps": H, "step": step}
        assert lines(path)[-1] == {"event": "frozen", **of_push, **base}
        if step == H:
            training.refuses(push, "bad_chunk")
            training.done()
            assert lines(path)[-1] == {"event": "dropped", **of_push, "why": "bad_chunk"}
    broker.grants(push)
    broker.takes_chunks(push, push.chunks)
    assert not of_kind(path, "counted")
    training.serves(5, 1, push)
    training.done()
    assert lines(path)[-1] == {"event": "counted", **of_push, "version": name(version(1))}
    training.worker.close()
    events = [line["event"] for line in lines(path)]
    assert events == ["joined", "frozen", "dropped", "frozen", "counted", "left"]


def test_log_survives_a_killed_worker(processes: Processes, tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    with Broker(make_config(sync_every=5)) as broker:
        script = str(KIT / "train_script.py")
        worker = processes.run(
            script,
            "100000",
            str(tmp_path / "out.json"),
            DILOCO_SERVER=broker.address,
            DILOCO_WORKER_ID="a",
            DILOCO_AUDIT=str(path),
        )
        worker.says("step 15")
        worker.kill()
        worker.ends()
        with DiLoCoClient(broker.address, timeout=20) as observer:
            ledger = observer.pull().ledger
    frozen = {line["push_id"] for line in of_kind(path, "frozen")}
    named = {f"{counted.push_id:016x}" for counted in ledger.pushes["a"]}
    assert len(named) >= 3
    assert named <= frozen, "the broker counted only pushes in the log"
    assert not of_kind(path, "left")


@pytest.mark.parametrize("where", ["", "missing/audit.jsonl"])
def test_unwritable_file_is_refused_at_the_start(tmp_path: Path, where: str) -> None:
    descent = Descent()
    worker = DiLoCoWorker(
        descent.model,
        descent.optimizer,
        server="tcp://127.0.0.1:1",
        options={"audit": tmp_path / where},
    )
    with pytest.raises(UsageError, match="audit log") as refused:
        worker.start()
    assert str(tmp_path / where) in str(refused.value)


def test_full_disk_of_the_log_is_logged_once_and_training_continues(
    training: ScriptedTraining, caplog: pytest.LogCaptureFixture
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    training.begins(options={"audit": "/dev/full"})
    training.round(H, 1)
    assert training.metrics.pushes == 1
    assert caplog.text.count("audit log /dev/full could not be written") == 1
