"""A model in several modules, as pipelines have them, in the place of one.

The parts of a pipeline are cut out of one model and keep its names, so their tensors, one part after the
other, are those of the whole model: a worker with all of it in one module may be in the same run. A name
that two parts have for different tensors would stand for either, so it is refused; buffers that are not
saved (a table of rotary embeddings that each part has for itself) may have any name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

from torch import nn

from diloco_protocol import UsageError
from diloco_worker.model import wrappers
from diloco_worker.model.wrappers import Named


class ModelParts(nn.Module):
    """Modules side by side, each under its own names. It is there to be read, not to be called.

    Raises:
        UsageError: no part, or a name that stands for two tensors.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        if not parts:
            raise UsageError("model is an empty list; give the modules that are trained here.")
        self.parts = tuple(parts)  # in a tuple they are no submodules, so their names stay
        self._owners: dict[str, int] = {}  # the part whose tensor a name stands for
        known: dict[str, object] = {}
        for number, part in enumerate(parts):
            for found in named_tensors(part):
                if not found.is_saved:
                    continue
                name, value = found.name, found.tensor
                if name in known and known[name] is not value:
                    raise UsageError(
                        f"Parts {self._owners[name]} and {number} of the model both have a "
                        f"{name!r}; give them names of their own, for instance as one "
                        'nn.ModuleDict({"first": ..., "second": ...}).'
                    )
                known.setdefault(name, value)
                self._owners.setdefault(name, number)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of all parts, as `nn.Module.named_parameters` gives them."""
        seen: set[int] = set()
        for found in self.tensors():
            if not found.is_parameter or (remove_duplicate and id(found.tensor) in seen):
                continue
            seen.add(id(found.tensor))
            name = f"{prefix}.{found.name}" if prefix else found.name
            yield name, cast(nn.Parameter, found.tensor)

    def tensors(self) -> Iterator[Named]:
        """Those of all parts, but for what the name of another part's tensor hides."""
        for number, part in enumerate(self.parts):
            for found in named_tensors(part):
                if self._owners.get(found.name, number) == number:
                    yield found


def named_tensors(module: nn.Module) -> Iterator[Named]:
    """The tensors of a model, or of one in parts, as `wrappers.named_tensors` gives them."""
    return module.tensors() if isinstance(module, ModelParts) else wrappers.named_tensors(module)


def parts_of(module: nn.Module) -> tuple[nn.Module, ...]:
    """The modules that a model consists of, for itself one."""
    return module.parts if isinstance(module, ModelParts) else (module,)
