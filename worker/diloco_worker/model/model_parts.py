"""A model in several modules, as pipelines have them, in the place of one.

The parts of a pipeline are cut out of one model and keep its names, so their state dicts, one behind the
other, are that of the whole model: a worker with all of it in one module may be in the same run. A name
that two parts have for different tensors would stand for either, so it is refused; what is in no state
dict (a table of rotary embeddings that each part has for itself) may have any name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from diloco_protocol import UsageError


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
            listed = part.state_dict(keep_vars=True)
            named: dict[str, object] = {n: t for n, t in listed.items() if isinstance(t, Tensor)}
            named.update((n, p) for n, p in part.named_parameters() if p.requires_grad)
            for name, value in named.items():
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
        return self._own("named_parameters", prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Those of all parts, as `nn.Module.named_buffers` gives them."""
        return self._own("named_buffers", prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Those of the parts in one; the arguments are those of `nn.Module.state_dict`."""
        # One name stands for one tensor, whichever part it is read from.
        return {
            name: value
            for part in self.parts
            for name, value in part.state_dict(*args, **kwargs).items()
        }

    def _own(
        self, method: str, prefix: str, recurse: bool, remove_duplicate: bool
    ) -> Iterator[tuple[str, Any]]:
        """What this method of each part gives, but for what the name of another part's tensor hides."""
        seen: set[int] = set()
        for number, part in enumerate(self.parts):
            for name, value in getattr(part, method)("", recurse, remove_duplicate):
                if self._owners.get(name, number) != number or (
                    remove_duplicate and id(value) in seen
                ):
                    continue
                seen.add(id(value))
                yield f"{prefix}.{name}" if prefix else name, value


def parts_of(module: nn.Module) -> tuple[nn.Module, ...]:
    """The modules that a model consists of, for itself one."""
    return module.parts if isinstance(module, ModelParts) else (module,)
