"""A plain loop with Accelerate: what it comes to is what the same loop without it comes to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kit.integrations import needs, trained
from kit.process_kit import Processes

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400), needs("accelerate")]
pytest_plugins = ("kit.process_fixtures",)

SCRIPT = Path(__file__).with_name("accelerate_script.py")


def test_a_killed_and_resumed_loop_of_accelerate_comes_to_what_the_plain_loop_does(
    processes: Processes,
) -> None:
    plain = trained(processes)
    ours = trained(processes, SCRIPT, dies_at=7)
    for name, tensor in plain.items():
        # Two halves of a batch are added up in another order than a whole one.
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-5)
