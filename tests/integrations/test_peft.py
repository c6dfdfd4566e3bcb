"""Adapters of PEFT in the Trainer: they alone are trained, and they alone travel."""

from __future__ import annotations

from pathlib import Path

import pytest

from kit.integrations import needs, trained
from kit.process_kit import Processes

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(400),
    needs("transformers", "accelerate", "peft"),
]
pytest_plugins = ("kit.process_fixtures",)

SCRIPT = Path(__file__).with_name("lora_script.py")


def test_adapters_that_were_killed_and_resumed_come_to_those_of_the_plain_loop(
    processes: Processes,
) -> None:
    plain = trained(processes, SCRIPT, "plain")
    ours = trained(processes, SCRIPT, dies_at=7)
    moved = 0
    for name, tensor in plain.items():
        # The same bits, unless a release of transformers divides the loss by something else.
        assert (ours[name] - tensor).norm() <= 0.01 * tensor.norm(), name
        moved += "lora_B" in name and bool(tensor.count_nonzero())
    assert moved == 2, "the adapters of both layers have learnt something"
    sizes = [processes.result(name) for name in ("a", "b")]
    for each in sizes:
        assert each["all"] > 100 * each["trained"]
        assert each["moved"][1] < each["all"] / 5
    # One of the two has given the broker all of it, once.
    assert min(each["moved"][0] for each in sizes) < each["all"] / 5
