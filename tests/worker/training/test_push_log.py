"""The worker's own record of its pushes: what is in it, when, and whether it outlives the worker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from diloco_broker import Broker
from diloco_protocol import UsageError, VersionId
from diloco_protocol.messages import Error, Push
from diloco_worker import DiLoCoClient, DiLoCoWorker
from kit.paths import KIT
from kit.process_kit import Processes
from kit.scripted_broker import Beside, Descent, ScriptedBroker, run_config, version
from kit.uniform_model import Make, filled
from kit.whole_run import make_config, run, trainees

pytest_plugins = ("kit.worker_fixtures",)

H = 4


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def of_kind(path: Path, event: str) -> list[dict[str, Any]]:
    return [line for line in lines(path) if line["event"] == event]


def name(what: VersionId) -> list[Any]:
    return [what.run, what.counter, f"{what.tag:016x}"]


def test_every_push_is_frozen_and_then_counted_in_the_version_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    config = make_config(workers=2, min_workers=2, sync_every=4, num_fragments=2)
    with Broker(config) as broker:
        run(broker, trainees(2), 12, audit=path)
        with DiLoCoClient(broker.address, timeout=20) as observer:
            last = observer.pull()
    for worker in ("w0", "w1"):
        mine = [line for line in lines(path) if line["worker"] == worker]
        assert [line["event"] for line in mine] == [
            "joined",
            *["frozen", "counted"] * 6,
            "left",
        ]
        assert mine[0]["epoch"]
        assert mine[-1]["step"] == 12
        pushes = mine[1:-1]
        bases: dict[int, list[Any]] = {}
        for number, (frozen, counted) in enumerate(zip(pushes[::2], pushes[1::2], strict=True)):
            fragment = number % 2
            assert frozen["push_id"] == counted["push_id"]
            assert len(frozen["push_id"]) == 16
            assert frozen["fragment"] == counted["fragment"] == fragment
            assert (frozen["steps"], frozen["step"]) == (2 if number == 0 else 4, 2 * number + 2)
            assert frozen["base"][1] + 1 == counted["version"][1] == number // 2 + 1
            assert frozen["base"] == bases.get(fragment, frozen["base"])
            bases[fragment] = counted["version"]
        assert bases == {f: name(v) for f, v in last.versions.items()}
        named = {f"{counted.push_id:016x}" for counted in last.ledger.pushes[worker]}
        assert named == {line["push_id"] for line in pushes if line["fragment"] == 0}


def test_freeze_is_written_before_anything_of_it_is_sent(
    broker: ScriptedBroker, beside: Beside, begin: Make, tmp_path: Path
) -> None:
    path = tmp_path / "audit.jsonl"
    _, descent = begin(audit=str(path))
    steps = beside(descent.steps, H)
    push = broker.hears(Push)
    (frozen,) = of_kind(path, "frozen")
    assert frozen == {
        "event": "frozen",
        "worker": "me",
        "push_id": f"{push.push_id:016x}",
        "fragment": 0,
        "steps": H,
        "base": name(version(0)),
        "step": H,
    }
    broker.grants(push)
    broker.takes_chunks(push, push.chunks)
    assert not of_kind(path, "counted")
    broker.serves(filled(descent, 5), version(1), push.push_id)
    steps()
    (counted,) = of_kind(path, "counted")
    assert (counted["push_id"], counted["version"]) == (frozen["push_id"], name(version(1)))


def test_push_that_is_refused_is_dropped_with_the_code(
    broker: ScriptedBroker, beside: Beside, begin: Make, tmp_path: Path
) -> None:
    path = tmp_path / "audit.jsonl"
    _, descent = begin(audit=path)
    steps = beside(descent.steps, H)
    push = broker.hears(Push)
    broker.says(Error("bad_chunk", "Too short.", push_id=push.push_id))
    steps()
    (dropped,) = of_kind(path, "dropped")
    assert (dropped["push_id"], dropped["fragment"], dropped["why"]) == (
        f"{push.push_id:016x}",
        0,
        "bad_chunk",
    )
    assert not of_kind(path, "counted")


def test_push_that_lands_while_leaving_is_counted(
    broker: ScriptedBroker, beside: Beside, begin: Make, tmp_path: Path
) -> None:
    path = tmp_path / "audit.jsonl"
    broker.config = run_config(fragment_sync_delay=2)
    worker, descent = begin(audit=path)
    descent.steps(H)
    closed = beside(worker.close)
    push, _ = broker.takes_push()
    broker.serves(filled(descent, 5), version(1), push.push_id)
    closed()
    assert [line["event"] for line in lines(path)] == ["joined", "frozen", "counted", "left"]
    assert of_kind(path, "counted")[0]["version"] == name(version(1))


def test_each_welcome_is_written_with_its_epoch(
    broker: ScriptedBroker, begin: Make, tmp_path: Path
) -> None:
    path = tmp_path / "audit.jsonl"
    begin(audit=path)
    broker.restart()
    broker.welcomes(version(0))
    assert [line["epoch"] for line in of_kind(path, "joined")] == ["epoch", "epoch"]


def test_record_outlives_a_worker_that_is_killed(processes: Processes, tmp_path: Path) -> None:
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
    assert named <= frozen, "the broker has counted nothing that the worker has not written down"
    assert not of_kind(path, "left")


def test_another_life_appends(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    with Broker(make_config(sync_every=2)) as broker:
        for _ in range(2):
            run(broker, trainees(1), 2, audit=path)
    assert [line["event"] for line in lines(path)] == ["joined", "frozen", "counted", "left"] * 2


@pytest.mark.parametrize("where", ["", "missing/audit.jsonl"])
def test_file_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path, where: str) -> None:
    descent = Descent()
    worker = DiLoCoWorker(
        descent.model, descent.optimizer, server="tcp://127.0.0.1:1", audit=tmp_path / where
    )
    with pytest.raises(UsageError, match=r"audit log .* cannot be written") as refused:
        worker.start()
    assert str(tmp_path / where) in str(refused.value)


def test_full_disk_ends_the_record_and_not_the_training(
    broker: ScriptedBroker, beside: Beside, begin: Make, caplog: pytest.LogCaptureFixture
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    worker, descent = begin(audit="/dev/full")
    steps = beside(descent.steps, H)
    push, _ = broker.takes_push()
    broker.serves(filled(descent, 5), version(1), push.push_id)
    steps()
    assert worker.sync_metrics.rounds == 1
    assert caplog.text.count("audit log /dev/full could not be written") == 1


def test_script_that_trains_alone_writes_nothing(tmp_path: Path) -> None:
    descent = Descent()
    with DiLoCoWorker(descent.model, descent.optimizer, audit=tmp_path / "audit.jsonl"):
        descent.steps(2)
    assert not list(tmp_path.iterdir())


def test_audit_must_be_a_path() -> None:
    descent = Descent()
    wrong: Any = 7
    with pytest.raises(UsageError, match="audit is 7; it must be the path of a file"):
        DiLoCoWorker(descent.model, descent.optimizer, audit=wrong)
