"""The callback in Lightning's Trainer: the same bits as the plain loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kit.integrations import needs, trained
from kit.process_kit import Processes

pytestmark = [pytest.mark.integration, needs("lightning")]
pytest_plugins = ("kit.process_fixtures",)

SCRIPT = Path(__file__).with_name("lightning_script.py")


def test_a_killed_and_resumed_trainer_comes_to_the_bits_of_the_plain_loop(
    processes: Processes,
) -> None:
    plain = trained(processes)
    ours = trained(processes, SCRIPT, dies_at=7)
    for name, tensor in plain.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=0)
    lives = [
        path.read_text().splitlines() for path in sorted(processes.folder.glob("a-log/*/*.csv"))
    ]
    assert [life[1].split(",")[life[0].split(",").index("step")] for life in lives][-1] == "5"
    (log, *_) = processes.folder.glob("b-log/*/metrics.csv")
    first, *_, last = log.read_text().splitlines()
    figures = dict(zip(first.split(","), last.split(","), strict=True))
    assert (figures["diloco/round"], figures["diloco/rounds"]) == ("4.0", "4.0")
