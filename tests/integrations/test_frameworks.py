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
    torch.testing.assert_close(ours, plain, rtol=rtol, atol=rtol / 10)


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
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@needs("transformers", "accelerate", "peft")
def test_killed_and_resumed_adapters_equal_those_of_a_calm_run(
    processes: Processes, tmp_path: Path
) -> None:
    """A checkpoint of PEFT has the adapters alone."""
    script, found = FOLDER / "lora_script.py", []
    for name, dies_at in (("calm", None), ("killed", 7)):
        processes.folder = tmp_path / name
        processes.folder.mkdir()
        found.append(trained(processes, script, dies_at=dies_at))
    calm, killed = found
    assert all(torch.equal(killed[name], tensor) for name, tensor in calm.items())
    moved = [bool(tensor.any()) for name, tensor in calm.items() if "lora_B" in name]
    assert moved == [True] * 2, "the adapters of both layers have learnt something"
