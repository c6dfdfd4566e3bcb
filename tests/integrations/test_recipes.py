"""The recipes for other people's trainers, each with the real library, small and on CPU."""

from pathlib import Path

import pytest
import torch

from kit.examples import BROKER, FOLDER, LAST_ROUND, STEPS, losses
from kit.integrations import needs
from kit.process_kit import Processes

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]


RECIPES = FOLDER / "recipes"
SCRIPT = Path(__file__).parent / "recipe_script.py"
# Large, or with pins that conflict with those of the others.
APART = {"how": "install it in an environment of its own, as the recipe says"}
LIBRARIES = {
    "accelerate_loop.py": needs("accelerate"),
    "diffusers_unet.py": needs("accelerate", "diffusers"),
    "fabric_loop.py": needs("lightning"),
    "litgpt_pretrain.py": needs("litgpt", **APART),
    "llamafactory_sft.py": needs("llamafactory", **APART),
    "nanochat_base.py": needs("nanochat", **APART),
    "torchtitan_llama3.py": needs("torchtitan", "triton", **APART),
    "trl_sft.py": needs("transformers", "trl"),
}
WITHIN_S = 500.0  # on a busy machine some import for minutes


def test_each_recipe_is_short_and_tested() -> None:
    found = {path.name: path.read_text().splitlines() for path in RECIPES.glob("*.py")}
    assert set(found) == set(LIBRARIES)
    assert max(map(len, found.values())) <= 65


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needed) for name, needed in LIBRARIES.items()]
)
def test_workers_of_a_recipe_end_with_equal_parameters(processes: Processes, name: str) -> None:
    broker = processes.broker(**BROKER)
    env = {"DILOCO_SERVER": broker.address(), "DILOCO_NUM_SHARDS": "2"}
    env["HF_HUB_OFFLINE"] = "1"
    words = (str(RECIPES / name), "--steps", str(STEPS))
    both = [
        processes.run(
            str(SCRIPT), each, *words, DILOCO_WORKER_ID=each, DILOCO_SHARD_INDEX=index, **env
        )
        for each, index in (("a", "0"), ("b", "1"))
    ]
    for child in both:
        assert child.ends(WITHIN_S) == 0, child.output
        first, *_, last = losses(child.output)
        assert last < first, child.output
    broker.says(LAST_ROUND)
    one, other = (torch.load(processes.folder / f"{each}.pt") for each in "ab")
    assert one and all(torch.equal(other[key], tensor) for key, tensor in one.items())
