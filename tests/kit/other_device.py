"""A second device for machines without one: its tensors have values, and what leaves it is counted.

To torch it is the device "meta", whose own tensors have no values. As on an accelerator, an operation
cannot mix its tensors with those of the host, and their memory cannot be read. `OtherDevice()` has to be
entered by a thread that makes tensors there; one that only has some need not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

THERE = torch.device("meta")
_BETWEEN_DEVICES = ("aten::_to_copy", "aten::copy_", "aten::_local_scalar_dense")


class OnOther(Tensor):
    bare: Tensor  # its values on the host, for this module
    is_meta = False

    @staticmethod
    def __new__(cls, values: Tensor) -> OnOther:
        place = values.stride(), values.storage_offset()
        made = Tensor._make_wrapper_subclass(
            cls, values.shape, *place, dtype=values.dtype, device=THERE
        )
        made.bare = values
        return made

    def data_ptr(self) -> int:
        return self.bare.data_ptr()

    @classmethod
    def __torch_dispatch__(
        cls, operation: Any, kinds: Any, given: Any = (), named: dict[str, Any] | None = None
    ) -> Any:
        return _carried_out(operation, given, named or {})


class OtherDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The device, and the bytes that have come from it to the host since it was made."""

    to_host = 0

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        OtherDevice.to_host = 0

    def __torch_dispatch__(
        self, operation: Any, kinds: Any, given: Any = (), named: dict[str, Any] | None = None
    ) -> Any:
        return _carried_out(operation, given, named or {})


def _carried_out(operation: Any, given: Any, named: dict[str, Any]) -> Any:
    tensors = [each for each in tree_flatten((given, named))[0] if isinstance(each, Tensor)]
    theirs = [each for each in tensors if isinstance(each, OnOther)]
    name = operation._schema.name
    if theirs and name not in _BETWEEN_DEVICES:
        mixed = [each for each in tensors if each.dim() and not isinstance(each, OnOther)]
        assert not mixed, f"{name} mixes devices"
    wanted = named.pop("device", None)
    is_there = bool(theirs) if wanted is None else wanted == THERE
    if wanted is not None:
        named["device"] = torch.device("cpu")
    if name == "aten::copy_":
        is_there = isinstance(given[0], OnOther)
    result = operation(*_bare(given), **_bare(named))
    if theirs and (not is_there or name == "aten::_local_scalar_dense"):
        OtherDevice.to_host += theirs[-1].bare.nbytes
    written = [each for each in theirs if each.bare is result]
    if written:
        return written[0]
    if operation._schema.is_mutable and name == "aten::copy_":
        return given[0]
    return tree_map_only(Tensor, OnOther, result) if is_there else result


def _bare(given: Any) -> Any:
    return tree_map_only(OnOther, lambda each: each.bare, given)
