"""A worker that is killed with SIGKILL in the middle of an upload, and goes on from its checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco_broker import Broker, BrokerConfig
from diloco_worker import DiLoCoClient
from kit import process_kit
from kit.process_kit import LOCAL, PATIENCE_S, Processes, a_line, step_of_a_line
from kit.proxy import ForgettingProxy

pytest_plugins = ("kit.process_fixtures",)

H = 4
# The proxy swallows everything from here on: about half of the 36 chunks are at the broker then.
CHUNKS = 20


def reached(first: int, steps: int) -> torch.Tensor:
    """Where a worker gets to from the first parameters, all by itself."""
    model = a_line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(first, first + steps):
        step_of_a_line(model, optimizer, number)
    return model.weight.detach()


@pytest.mark.parametrize(
    ("saved_at", "reducer"),
    [(None, {}), (2, {"deterministic": True})],
    ids=["begun again", "resumed, staged"],
)
def test_upload_that_a_kill_cut_short_and_its_repetition_are_one_vote(
    processes: Processes, tmp_path: Path, saved_at: int | None, reducer: dict[str, Any]
) -> None:
    audit, path = tmp_path / "audit.jsonl", tmp_path / "script.pt"
    rule: dict[str, Any] = {"outer": "sgd", "outer_lr": 1.0, "disconnect_grace": 0.1}
    config = BrokerConfig(workers=2, sync_every=H, audit=str(audit), **LOCAL, **rule, **reducer)
    start = a_line().weight.detach()
    with (
        Broker(config) as broker,
        ForgettingProxy(broker.address, True, CHUNKS) as proxy,
        DiLoCoClient(broker.address, worker_id="b", timeout=PATIENCE_S) as other,
    ):
        other.join(a_line())
        script = (process_kit.train_from_checkpoint, broker.address, path, saved_at or 0, H)
        first = processes.start(script[0], proxy.address, *script[2:])
        assert proxy.has_forgotten.wait(PATIENCE_S), "it never got to its upload"
        first.kill()
        assert path.exists() is (saved_at is not None)
        second = processes.start(*script)
        second.says(f"begins at {saved_at or 0}")
        theirs = torch.full_like(start, 0.5)
        other.push({"weight": theirs}, steps=H)
        got = other.pull().tensors["weight"]
        assert second.ends() == 0
        status = other.status()
    mine = start - reached(0, H)
    torch.testing.assert_close(got, start - (mine + theirs) / 2, rtol=1e-6, atol=1e-6)
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    (version,) = [line for line in lines if line["pushes"]]
    lives = [push for push in version["pushes"] if push["worker"] == "a"]
    assert len(lives) == (1 if reducer else 2), "the kill came too early or too late for this test"
    assert status["round"]["number"] == 1
