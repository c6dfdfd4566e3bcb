"""One fragment as a torch optimizer sees it: parameters mapped to chunks, and parameter groups."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from diloco_protocol.chunks import FragmentLayout, Segment, overlaps
from diloco_protocol.errors import UsageError
from diloco_protocol.feed import OuterGroup
from diloco_protocol.tensors.codecs import is_finite

WANTED = "it must return a torch.optim.Optimizer over all given parameters"


class FragmentParameters(list[Parameter]):
    """The argument of a factory: a fragment's parameters, fp32, in the manifest's order and shapes.

    `fragment` is its number, from 0; `named` has the same parameters by name, in the same order.
    """

    def __init__(self, fragment: int, named: dict[str, Parameter]) -> None:
        super().__init__(named.values())
        self.fragment = fragment
        self.named = named


OuterOptimizerFactory = Callable[[FragmentParameters], torch.optim.Optimizer]
"""Makes the outer optimizer of one fragment; called once for each fragment that has parameters.

    lambda parameters: torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)
    lambda parameters: torch.optim.AdamW([
        {"params": [parameters.named["embedding.weight"]], "lr": 0.1},
        {"params": [p for name, p in parameters.named.items() if name != "embedding.weight"]},
    ])
"""


class TorchFragment:
    """Separate tensors of a fragment's parameters, and the torch optimizer over them.

    Chunks of parameters are identified by their index in the fragment, which has at least one. All
    chunks of `masters` are present, and are copied. Raises UsageError if the factory fails or returns an
    unusable object.
    """

    def __init__(
        self, factory: OuterOptimizerFactory, layout: FragmentLayout, masters: list[Tensor | None]
    ) -> None:
        places = [place for place in layout.places if place.segment is Segment.PARAMETERS]
        spans = [span for span in layout.spans if span.segment is Segment.PARAMETERS]
        self.spans = {span.index: span for span in spans}  # the chunks of parameters
        self._pieces = {span.index: list(overlaps(places, span)) for span in spans}
        self._parameters = FragmentParameters(
            layout.fragment, {p.entry.name: Parameter(torch.empty(p.entry.shape)) for p in places}
        )
        self.load(masters, self.spans)
        self.optimizer = self._make(factory)
        self._check()

    # Between chunks and the optimizer's tensors.

    @torch.no_grad()
    def load(self, masters: list[Tensor | None], indices: Iterable[int]) -> None:
        """Copy chunks into the optimizer's parameters."""
        for index in indices:
            values = placed(masters, index)
            for piece in self._pieces[index]:
                parameter = self._parameters[piece.place]
                parameter.view(-1)[piece.in_tensor] = values[piece.in_chunk]

    @torch.no_grad()
    def cut(self, index: int) -> Tensor:
        """Copy a chunk out of the optimizer's parameters, for readers to share."""
        values = torch.empty(self.spans[index].elements)
        for piece in self._pieces[index]:
            flat = self._parameters[piece.place].reshape(-1)
            values[piece.in_chunk] = flat[piece.in_tensor]
        return values

    # Stepping.

    def step(self, gradients: Mapping[int, Tensor], factor: float = 1.0) -> None:
        """Call `optimizer.step()` with these gradients by chunk, and 0 elsewhere.

        `factor`, above 0, scales the learning rate of all groups for this step.
        """
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)
        for index, gradient in gradients.items():
            for piece in self._pieces[index]:
                grad = self._parameters[piece.place].grad
                assert grad is not None
                grad.view(-1)[piece.in_tensor] = gradient[piece.in_chunk]
        try:
            with self._scaled(factor):
                self.optimizer.step()
        except Exception as error:
            raise UsageError(
                f"The outer optimizer {self._name} failed in step(): {error!r}; choose one whose "
                "step() needs only the gradients."
            ) from error
        finally:
            for parameter in self._parameters:
                parameter.grad = None

    @contextmanager
    def _scaled(self, factor: float) -> Iterator[None]:
        """Scale the lr of all groups within this context, in which a scheduler may change it."""
        groups = [each for each in self.optimizer.param_groups if factor != 1 and "lr" in each]
        before = [group["lr"] for group in groups]
        scaled = [lr * factor for lr in before]
        for group, lr in zip(groups, scaled, strict=True):
            group["lr"] = lr
        try:
            yield
        finally:
            for group, own, lr in zip(groups, before, scaled, strict=True):
                group["lr"] = own if group["lr"] == lr else group["lr"] / factor

    def is_state_finite(self) -> bool:
        """Whether all moments are finite.

        An enormous gradient can leave finite parameters but infinite moments: Adam then divides by an
        infinite second moment, and its parameters never change again.
        """
        return all(
            is_finite(value)
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor) and value.is_floating_point()
        )

    def state_dict(self) -> dict[str, Any]:
        """A copy of the optimizer's state, which later steps do not change."""
        return copy.deepcopy(self.optimizer.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a copy of a result of `state_dict`."""
        self.optimizer.load_state_dict(copy.deepcopy(state))

    # Groups.

    def groups(self) -> list[OuterGroup]:
        """The current settings of each group; for Adam and its variants the momentum is beta 1."""
        return [
            OuterGroup(_number(group.get("lr")), _number(_momentum(group)))
            for group in self.optimizer.param_groups
        ]

    def tune(self, settings: Mapping[str, float]) -> None:
        """Set "lr" or "momentum" (beta 1 for Adam's kind) of all groups, which must have it."""
        for group in self.optimizer.param_groups:
            if "lr" in settings:
                group["lr"] = settings["lr"]
            if "momentum" in settings and "momentum" in group:
                group["momentum"] = settings["momentum"]
            elif "momentum" in settings:
                group["betas"] = (settings["momentum"], *group["betas"][1:])

    # Making it.

    @property
    def _name(self) -> str:
        return f"{type(self.optimizer).__name__} of fragment {self._parameters.fragment}"

    def _make(self, factory: OuterOptimizerFactory) -> torch.optim.Optimizer:
        fragment = self._parameters.fragment
        try:
            made = factory(self._parameters)
        except Exception as error:
            raise UsageError(
                f"outer_optimizer_factory failed for fragment {fragment} with "
                f"{len(self._parameters)} parameters: {error!r}; {WANTED}."
            ) from error
        if not isinstance(made, torch.optim.Optimizer):
            raise UsageError(
                f"outer_optimizer_factory returned {type(made).__name__} for fragment {fragment}; "
                f"{WANTED}."
            )
        return made

    def _check(self) -> None:
        """Check that the optimizer can be saved and has all parameters."""
        fragment = self._parameters.fragment
        try:
            json.dumps(self.optimizer.state_dict()["param_groups"])
        except TypeError as error:
            raise UsageError(
                f"outer_optimizer_factory returned an optimizer whose settings cannot be saved "
                f"({error}); give plain numbers, such as lr=0.1 instead of a tensor."
            ) from None
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        lacking = [name for name, p in self._parameters.named.items() if id(p) not in held]
        if lacking:
            raise UsageError(
                f"outer_optimizer_factory omitted {len(lacking)} of {len(self._parameters)} parameters "
                f"of fragment {fragment}, the first is {lacking[0]}; {WANTED}."
            )


def _momentum(group: Mapping[str, Any]) -> Any:
    """Momentum or beta 1 of a group; None if it has neither."""
    betas = group.get("betas")
    return group.get("momentum", betas[0] if betas else None)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def placed(masters: list[Tensor | None], index: int) -> Tensor:
    """The value of a chunk, which must be present."""
    values = masters[index]
    assert values is not None, f"chunk {index} has no value yet"
    return values
