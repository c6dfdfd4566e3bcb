"""Scripts of other frameworks, killed and resumed once, come to what the plain loop comes to."""

from pathlib import Path

import pytest
import torch

from kit.integrations import PATIENT, PLAIN, WITHIN_S, needs, trained
from kit.process_kit import Processes

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

FOLDER = Path(__file__).parent


@pytest.mark.parametrize(
    ("script", "rtol"),
    [
        # Two halves of a batch are added up in another order than a whole one.
        pytest.param("accelerate_script.py", 1e-4, marks=needs("accelerate")),
        pytest.param("fabric_script.py", 0.0, marks=needs("lightning")),
        pytest.param("lightning_script.py", 0.0, marks=needs("lightning")),
        pytest.param("trainer_script.py", 0.0, marks=needs("transformers", "accelerate")),
    ],
)
def test_resumed_script_equals_plain_loop(processes: Processes, script: str, rtol: float) -> None:
    plain = trained(processes)
    ours = trained(processes, FOLDER / script, dies_at=7)
    for name, tensor in plain.items():
        torch.testing.assert_close(ours[name], tensor, rtol=rtol, atol=rtol / 10)


@needs("lightning")
def test_model_that_fabric_wraps_in_ddp_shares_a_run_with_a_plain_one(
    processes: Processes,
) -> None:
    address = processes.broker(**PATIENT).address()
    scripts = [(FOLDER / "fabric_script.py", "a", "ddp"), (PLAIN, "b")]
    for child in [
        processes.run(*map(str, words), DILOCO_SERVER=address, MASTER_PORT="0") for words in scripts
    ]:
        assert child.ends(WITHIN_S) == 0, child.output
    one, other = (torch.load(processes.folder / f"{name}.pt") for name in "ab")
    assert all(torch.equal(one[name], value) for name, value in other.items())


@needs("transformers", "accelerate", "peft")
def test_killed_and_resumed_adapters_equal_those_of_the_plain_loop(
    processes: Processes,
) -> None:
    """They alone are trained, and they alone travel."""
    script = FOLDER / "lora_script.py"
    plain = trained(processes, script, "plain")
    ours = trained(processes, script, dies_at=7)
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
