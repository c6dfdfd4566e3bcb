"""The examples for other people's frameworks, and what is exported of them, in the real libraries."""

from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from diloco_broker.cli.app import app
from kit.examples import BROKER, losses, started, two_train
from kit.integrations import needs
from kit.process_kit import Processes

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("hugging_face.py", marks=needs("transformers", "accelerate")),
        pytest.param("lightning_module.py", marks=needs("lightning")),
        pytest.param("lora.py", marks=needs("transformers", "peft")),
    ],
)
def test_two_workers_train_by_the_example(processes: Processes, name: str) -> None:
    for output in two_train(processes, name):
        first, *_, last = losses(output)
        assert last < first, output


def exported(processes: Processes, name: str, out: str, like: str) -> str:
    """The folder of an export, once the example has trained; `like` names what it shall look like."""
    address = processes.broker(**BROKER | {"workers": 1}).address()
    worker = started(processes, name, "a", address, "--out", str(processes.folder / out))
    assert worker.ends(within=90) == 0, worker.output
    *_, newest = sorted(processes.folder.glob(like))
    to = str(processes.folder / "exported")
    command = ["export", address, "--to", to, "--like", str(newest)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    return to


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft, for transformers
@needs("transformers", "peft")
def test_exported_adapters_load_into_the_base_model(processes: Processes) -> None:
    import peft
    import transformers

    to = exported(processes, "lora.py", "adapters", "adapters")
    torch.manual_seed(0)  # the base of the example
    base: Any = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
        )
    )
    model = peft.PeftModel.from_pretrained(base, to)
    loaded = {name: each for name, each in model.named_parameters() if "lora_B" in name}
    assert loaded and all(each.abs().max() > 0 for each in loaded.values())
    numbers = torch.arange(16)[None]
    assert model(input_ids=numbers, labels=numbers).loss < 4.0


@needs("transformers")
def test_exported_folder_loads_with_from_pretrained(processes: Processes) -> None:
    import transformers

    to = exported(processes, "hugging_face.py", "trained", "trained/checkpoint-*")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(to)
    numbers = torch.arange(16)[None]
    assert model(input_ids=numbers, labels=numbers).loss < 4.0
