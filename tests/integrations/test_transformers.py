"""The callback in Hugging Face's Trainer: the same bits as the plain loop, and what a Trainer does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kit.integrations import needs, trained
from kit.process_kit import Processes

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(400),
    needs("transformers", "accelerate"),
]
pytest_plugins = ("kit.process_fixtures",)

SCRIPT = Path(__file__).with_name("trainer_script.py")


def test_a_killed_and_resumed_trainer_comes_to_the_bits_of_the_plain_loop(
    processes: Processes,
) -> None:
    plain = trained(processes)
    ours = trained(processes, SCRIPT, dies_at=7)
    for name, tensor in plain.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=0)
