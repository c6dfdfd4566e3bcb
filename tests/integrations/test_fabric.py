"""A loop with Lightning's Fabric: the same bits as the plain loop, and a run with plain workers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kit.integrations import PATIENT, PLAIN, WITHIN_S, needs, trained
from kit.process_kit import Processes

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400), needs("lightning")]
pytest_plugins = ("kit.process_fixtures",)

SCRIPT = Path(__file__).with_name("fabric_script.py")


def test_a_killed_and_resumed_loop_of_fabric_comes_to_the_bits_of_the_plain_loop(
    processes: Processes,
) -> None:
    plain = trained(processes)
    ours = trained(processes, SCRIPT, dies_at=7)
    for name, tensor in plain.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=0)


def test_a_model_that_fabric_wraps_in_ddp_shares_a_run_with_a_plain_one(
    processes: Processes,
) -> None:
    address = processes.broker(**PATIENT).address()
    scripts = [(SCRIPT, "a", "ddp"), (PLAIN, "b")]
    for child in [
        processes.run(*map(str, words), DILOCO_SERVER=address, MASTER_PORT="0") for words in scripts
    ]:
        assert child.ends(WITHIN_S) == 0, child.output
    one, other = (torch.load(processes.folder / f"{name}.pt") for name in "ab")
    assert all(torch.equal(one[name], value) for name, value in other.items())
