"""Seconds that a boundary keeps a GPU from training: `python -m gpu.table`, or `make test-cuda`.

For 125 million and a billion parameters in fp32 and each wire dtype: to freeze a delta, with a residual
where there is one, and have its values or codes on the host; and to merge a version under the steps made
since. With the base on the host, with the base on the device, and of a model on the host, whose codes
other threads make while it trains.
"""

import argparse
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from diloco_protocol import Kind, Manifest, TensorEntry, lay_out
from diloco_protocol.dtypes import is_quantized
from diloco_worker.model.feedback import Feedback
from diloco_worker.model.flat_state import FlatState
from diloco_worker.model.merging import Change
from diloco_worker.model.model_tensors import ModelTensors

WIRES = ("fp32", "bf16", "int8", "int4", "int4z", "sparse")
LAYER = 1 << 24  # parameters of a tensor


def tensors_of(parameters: int, device: torch.device) -> ModelTensors:
    """A model with this many parameters, in tensors of a layer."""
    sizes = [LAYER] * (parameters // LAYER) + [parameters % LAYER or 1]
    names = [f"layer{number}" for number in range(len(sizes))]
    values: dict[str, Tensor] = {
        name: torch.randn(size, device=device) for name, size in zip(names, sizes, strict=True)
    }
    entries = (TensorEntry(n, tuple(v.shape), "float32", Kind.TRAINABLE) for n, v in values.items())
    return ModelTensors.of_state(Manifest(tuple(entries)), values)


def seconds(action: Callable[[], object], device: torch.device) -> float:
    began = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def freeze_seconds(
    tensors: ModelTensors, base: FlatState, wire: str, device: torch.device
) -> float:
    """Of the second delta: memory is there, and a residual."""
    feedback = Feedback(base.layout, tensors.room)
    took = 0.0
    for number in range(2):
        made: list[FlatState] = []

        def freeze(made: list[FlatState] = made) -> None:
            flat = tensors.delta(base, wire).wire
            made.append(feedback.joined(flat) if is_quantized(wire) else flat)

        took = seconds(freeze, device)
        if is_quantized(wire):
            feedback.settle(number, (made[0], range(base.layout.chunks)), {})
    return took


def row(parameters: int, device: torch.device, base_on: torch.device) -> list[float]:
    tensors = tensors_of(parameters, device)
    part = lay_out(tensors.manifest).fragments[0]
    captured = tensors.capture(part)
    base = captured.to(base_on)
    with torch.no_grad():
        for tensor in tensors.lookup().values():
            tensor.mul_(1.001)
    found = [freeze_seconds(tensors, base, wire, device) for wire in WIRES]
    return [*found, seconds(lambda: tensors.bring_in(Change(base, origin=captured)), device)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parameters", type=int, nargs="*", default=[125_000_000, 1_000_000_000])
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        print("There is no CUDA device here, so there are no seconds to show.")
        sys.exit()
    device, host = torch.device(given.device), torch.device("cpu")
    print("parameters  model  base " + "".join(f"{name:>8}" for name in (*WIRES, "merge")))
    for parameters in given.parameters:
        for where, base_on in ((device, host), (device, device), (host, host)):
            cells = "".join(f"{each:8.3f}" for each in row(parameters, where, base_on))
            print(f"{parameters:>10,}  {where.type:5}  {base_on.type:5}{cells}", flush=True)


if __name__ == "__main__":
    main()
