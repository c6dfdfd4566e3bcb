"""Runs a recipe as it stands, and writes its model: `python recipe_script.py NAME RECIPE ...`"""

import importlib
import os
import runpy
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


def let_torchtitan_run_on_cpu() -> None:
    """Add the functions that `torch.cpu` lacks beside `torch.cuda`, and skip a barrier of NCCL."""
    os.environ |= {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}  # as torchrun
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    torch_utils: Any = torch._utils
    torch_utils._get_available_device_type = lambda: "cpu"
    cpu: Any = torch.cpu
    cpu.get_device_name = lambda _: "CPU"
    cpu.get_device_properties = lambda _: SimpleNamespace(total_memory=1 << 30)
    cpu.memory_stats = lambda _: {}
    cpu.reset_peak_memory_stats = cpu.empty_cache = lambda: None
    # FlexAttention has no backward pass on CPU.
    attention: Any = importlib.import_module("torchtitan.models.common.attention")
    configs: Any = importlib.import_module("torchtitan.models.common.config_utils")
    configs.get_attention_config = lambda _: attention.ScaledDotProductAttention.Config()
    utils: Any = importlib.import_module("torchtitan.distributed.utils")
    utils.set_pg_timeouts = lambda **_: None


def let_llamafactory_run_without_sound() -> None:
    """Stub torchaudio, which it imports for audio data; the build on PyPI needs CUDA libraries."""
    if find_spec("torchaudio") is None:
        sound = sys.modules["torchaudio"] = ModuleType("torchaudio")
        sound.__spec__ = ModuleSpec("torchaudio", None)


def main() -> None:
    _, name, *sys.argv = sys.argv
    torch.compiler.set_stance("force_eager")  # compiling takes minutes on a busy machine
    if "torchtitan" in sys.argv[0]:
        let_torchtitan_run_on_cpu()
    if "llamafactory" in sys.argv[0]:
        let_llamafactory_run_without_sound()
    found = runpy.run_path(sys.argv[0], run_name="__main__")
    tensors = found["model"].state_dict()
    for key, tensor in tensors.items():
        if hasattr(tensor, "to_local"):  # a DTensor, of the one process
            tensors[key] = tensor.to_local()
    torch.save(tensors, f"{name}.pt")


if __name__ == "__main__":
    main()
