"""Notices changes of a model during a run: layers unfrozen, frozen, replaced, renamed or retyped.

A run has the tensors that the model had when its worker was made. New ones are never sent, and a
replaced one is sent in place of the old. Only names, shapes, dtypes, `requires_grad` and identities are
compared, so it takes about a millisecond; values only of constants. Modules may replace their buffers,
and a parameter may get other `.data`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from diloco_protocol import Kind, TensorEntry
from diloco_protocol.manifest import summarise
from diloco_protocol.tensors.codecs import is_finite
from diloco_worker.model.model_manifest import dtype_name
from diloco_worker.model.wrappers import named_tensors


@dataclass(frozen=True)
class Seen:
    """A parameter as it was."""

    parameter: weakref.ref[Tensor]
    shape: tuple[int, ...]
    dtype: str
    is_trained: bool


class ModelWatch:
    """Compares the model with its state when this was made.

    Args:
        settle: called before each comparison; puts back parameters that were replaced for a while.
    """

    def __init__(self, model: nn.Module, settle: Callable[[], object] | None = None) -> None:
        self.problem: str | None = None  # the changes, a sentence
        self._model = model
        self._settle = settle
        self._before = _seen(model)
        self._ties = _ties(model)
        self._told: set[str] = set()

    def look(self) -> str | None:
        """Compare. Returns `problem` where it has something new."""
        clauses = self._clauses()
        self.problem = (
            f"The model has changed since its worker was made: {summarise(clauses)}. A run keeps the "
            "tensors in step that it began with; undo the change, or end the run and begin another "
            "with the changed model, an optimizer over its parameters, and a new DiLoCoWorker."
            if clauses
            else None
        )
        if self._told.issuperset(clauses):
            return None
        self._told.update(clauses)
        return self.problem

    def _clauses(self) -> list[str]:
        if self._settle is not None:
            self._settle()
        now = _seen(self._model)
        clauses = [
            f"{name} is new" for name in now if name not in self._before and now[name].is_trained
        ]
        for name, before in self._before.items():
            if name not in now:
                clauses.append(f"{name} is gone")
            else:
                clauses += _differences(name, before, now[name])
        live = _parameters(self._model)
        clauses += [
            f"{name} and {other} are not tied any more"
            for name, other in self._ties
            if name in live and other in live and live[name].data_ptr() != live[other].data_ptr()
        ]
        return clauses


class Constants:
    """Watches constant buffers: changes of them are not sent.

    A float buffer that holds an infinity when the worker is made (a causal mask) cannot be averaged. It
    is a constant of the frozen part, which travels once, as it is. NaN never travels.

    Args:
        live: each entry of the manifest with its current tensor.
    """

    def __init__(self, live: Callable[[], Iterator[tuple[TensorEntry, Tensor]]]) -> None:
        self._live = live
        self._values = {
            entry.name: tensor.clone()
            for entry, tensor in live()
            if entry.kind is Kind.FROZEN and entry.is_floating_point and not is_finite(tensor)
        }

    def warnings(self) -> Iterator[str]:
        """A sentence for each one that changed, once."""
        if not self._values:
            return
        for entry, tensor in self._live():
            before = self._values.get(entry.name)
            if before is not None and not torch.equal(before, tensor):
                del self._values[entry.name]
                yield (
                    f"{entry.name} has changed: it held infinities at the start, so it is a constant "
                    "and is not synchronised. Start with finite values, or make it persistent=False if "
                    "it is this worker's own."
                )


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    """By name, tied ones under each of their names."""
    return {found.name: found.tensor for found in named_tensors(model) if found.is_parameter}


def _seen(model: nn.Module) -> Mapping[str, Seen]:
    return {
        name: Seen(weakref.ref(p), tuple(p.shape), dtype_name(p), bool(p.requires_grad))
        for name, p in _parameters(model).items()
    }


def _ties(model: nn.Module) -> list[tuple[str, str]]:
    """Pairs of names of the same values."""
    first: dict[object, str] = {}
    ties = []
    for name, parameter in _parameters(model).items():
        if parameter.numel():
            other = first.setdefault((parameter.data_ptr(), parameter.shape), name)
            if other != name:
                ties.append((other, name))
    return ties


def _differences(name: str, before: Seen, now: Seen) -> list[str]:
    clauses = []
    if before.parameter() is not now.parameter():
        clauses.append(f"{name} is another parameter")
    if (before.shape, before.dtype) != (now.shape, now.dtype):
        was, is_now = (f"{each.dtype}{list(each.shape)}" for each in (before, now))
        clauses.append(f"{name} is {is_now} instead of {was}")
    if before.is_trained != now.is_trained:
        clauses.append(f"{name} is {'trained' if now.is_trained else 'frozen'} now")
    return clauses
