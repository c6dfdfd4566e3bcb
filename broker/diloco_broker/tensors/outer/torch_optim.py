"""Any torch.optim optimizer as the outer optimizer.

A torch optimizer steps whole tensors, so a fragment's step begins when the last of its parameter chunks
has been reduced, and holds the thread for as long as the optimizer needs: this path is exempt from the
rule that work on tensors is cut in slices. It also costs one more copy of the parameters (the
optimizer's own, which it changes in place and nobody else ever sees) and, during a step, one of the
optimizer's state, so that a step whose result cannot be used leaves no trace.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from diloco_broker.core.state.run import OuterGroup
from diloco_protocol.chunks import ChunkSpan, FragmentLayout, Place, Segment
from diloco_protocol.codecs import is_finite
from diloco_protocol.errors import UsageError

State = Mapping[str, Tensor]
"""What an outer optimizer remembers of one chunk, by name; a name is missing before its first use."""

DELAYED = "delayed"  # D, the sum of the gradients in the buffer


class FragmentParameters(list[Parameter]):
    """What a factory is given: a fragment's parameters, fp32, in the manifest's order and shapes.

    Attributes:
        fragment: number of the fragment, from 0.
        named: the same parameters by name, in the same order.
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


@dataclass(frozen=True)
class TorchOuter:
    """An outer optimizer made by a factory, and what it is used for.

    Attributes:
        factory: called once for each fragment.
        rule: "each" gradient goes through `optimizer.step()`; "fedbuff": the mean of each `size`
            does; "direct": that, and between them theta <- theta - lr g (see `outer.DirectDelayed`);
            "paper": the optimizer is never stepped, its groups say lr and momentum of Delayed
            Nesterov (see `outer.DelayedNesterov`), and its parameters keep their first values.
        size: N, gradients in a buffer.
        c: c of Delayed Nesterov.
    """

    factory: OuterOptimizerFactory
    rule: Literal["each", "fedbuff", "direct", "paper"] = "each"
    size: int = 1
    c: float = 0.0


@dataclass(frozen=True)
class Rate:
    """Elements [start, stop) of a chunk, whose parameters are all in one group of the optimizer."""

    start: int
    stop: int
    lr: float
    momentum: float = 0.0


@dataclass(frozen=True)
class _Piece:
    """Where a chunk and a parameter overlap: the same elements as [start, stop) of either."""

    parameter: int
    in_tensor: slice
    in_chunk: slice


class WholeTensors:
    """One fragment that a torch optimizer steps: its parameters, and the gradients collected for them.

    Chunks of parameters are named by their number in the fragment.

    Args:
        outer: the factory, and what its optimizer is used for.
        layout: the fragment; it has parameters.
        masters: the fragment's chunks, all placed; copied.

    Raises:
        UsageError: when the factory fails, or returns what cannot be used.
    """

    def __init__(
        self, outer: TorchOuter, layout: FragmentLayout, masters: list[Tensor | None]
    ) -> None:
        self._outer = outer
        places = [place for place in layout.places if place.segment is Segment.PARAMETERS]
        spans = [span for span in layout.spans if span.segment is Segment.PARAMETERS]
        self._spans = {span.index: span for span in spans}
        self._pieces = {span.index: list(_pieces(places, span)) for span in spans}
        self._parameters = FragmentParameters(
            layout.fragment,
            {p.entry.name: Parameter(torch.empty(p.entry.shape)) for p in places},
        )
        self._load(masters, self._spans)
        self.optimizer = self._make()
        self._awaited = set(self._spans)
        self._turns: list[dict[int, Tensor]] = []

    # Collecting a step's gradients.

    def collect(self, index: int, gradients: list[Tensor | None]) -> list[dict[int, Tensor]] | None:
        """Keep the gradients of a chunk, one for each turn; None where it takes no part.

        Returns:
            For each turn the gradients by chunk, once the last chunk has come; until then None.
        """
        assert index in self._awaited, f"chunk {index} is stepped twice in one step"
        self._awaited.discard(index)
        self._turns += [{} for _ in gradients[len(self._turns) :]]
        for turn, gradient in zip(self._turns, gradients, strict=False):
            if gradient is not None:
                turn[index] = gradient
        if self._awaited:
            return None
        self._awaited = set(self._spans)
        turns, self._turns = self._turns, []
        return turns

    # Stepping.

    def advance(
        self,
        masters: list[Tensor | None],
        states: list[State],
        gradients: Mapping[int, Tensor],
        count: int,
        fits: Callable[[ChunkSpan, Tensor], bool],
    ) -> set[int]:
        """Take one gradient of the fragment.

        A chunk without a gradient keeps its value and its share of the buffer, which is applied at a
        boundary all the same; the optimizer sees a gradient of 0 where there is neither.

        Args:
            masters: the fragment's chunks; new tensors take their place.
            states: the buffers' sums; likewise.
            gradients: fp32, by chunk.
            count: gradients of this fragment before this one.
            fits: whether a chunk's new value can be sent.

        Returns:
            Chunks of which something was left out because a result was not finite: this gradient,
            which then leaves no trace, or a buffer.
        """
        if self._outer.rule == "each":
            is_taken = self._step(masters, gradients, fits)
        elif (count + 1) % self._outer.size:
            is_taken = self._fill(masters, states, gradients, fits)
        else:
            return self._empty(masters, states, gradients, fits)
        return set() if is_taken else set(gradients)

    def _fill(
        self,
        masters: list[Tensor | None],
        states: list[State],
        gradients: Mapping[int, Tensor],
        fits: Callable[[ChunkSpan, Tensor], bool],
    ) -> bool:
        """Add a gradient to the buffer, between boundaries."""
        totals = _totals(states, gradients)
        if not _are_finite(totals):
            return False
        if self._outer.rule == "direct" and not self._descend(masters, gradients, fits):
            return False
        for index, total in totals.items():
            states[index] = {DELAYED: total}
        return True

    def _empty(
        self,
        masters: list[Tensor | None],
        states: list[State],
        gradients: Mapping[int, Tensor],
        fits: Callable[[ChunkSpan, Tensor], bool],
    ) -> set[int]:
        """Step on the mean of the buffer, at a boundary; without its gradient if that is unusable.

        The count goes on in any case: what stayed in the buffer would be divided by N together with
        the N gradients to come. So a buffer that overflows without this gradient is thrown away.
        """
        size = self._outer.size
        held = {index: states[index][DELAYED] for index in self._spans if DELAYED in states[index]}
        totals = held | _totals(states, gradients)
        left_out: set[int] = set()
        if not self._step(masters, {i: total / size for i, total in totals.items()}, fits):
            left_out |= gradients.keys()
            if not self._step(masters, {i: total / size for i, total in held.items()}, fits):
                left_out |= held.keys()
        for index in held:
            states[index] = {}
        return left_out

    def rates(self, index: int) -> list[Rate]:
        """lr and momentum of each part of a chunk, as the optimizer's groups say them now.

        Raises:
            UsageError: for a group that has neither.
        """
        found: list[Rate] = []
        for piece, number, group in self._groups_of(index):
            start, stop = piece.in_chunk.start, piece.in_chunk.stop
            lr = self._value(number, group, "lr")
            is_paper = self._outer.rule == "paper"
            momentum = self._value(number, group, "momentum") if is_paper else 0.0
            last = found[-1] if found else None
            if last is not None and (last.lr, last.momentum) == (lr, momentum):
                found[-1] = Rate(last.start, stop, lr, momentum)
            else:
                found.append(Rate(start, stop, lr, momentum))
        return found

    def _step(
        self,
        masters: list[Tensor | None],
        gradients: Mapping[int, Tensor],
        fits: Callable[[ChunkSpan, Tensor], bool],
    ) -> bool:
        """`optimizer.step()`, if there is any gradient; undone when the result is not finite."""
        if not gradients:
            return True
        if not _are_finite(gradients):
            return False
        saved = self.state_dict()
        self._run(gradients)
        stepped = {index: self._cut(index) for index in gradients}
        is_good = self._is_state_finite() and all(
            fits(self._spans[index], values) for index, values in stepped.items()
        )
        if is_good:
            for index, values in stepped.items():
                masters[index] = values
            # Weight decay and momentum move what has no gradient, too.
            self._load(masters, self._spans.keys() - stepped.keys())
        else:
            self.optimizer.load_state_dict(saved)
            self._load(masters, self._spans)
        return is_good

    def _run(self, gradients: Mapping[int, Tensor]) -> None:
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)
        for index, gradient in gradients.items():
            for piece in self._pieces[index]:
                grad = self._parameters[piece.parameter].grad
                assert grad is not None
                grad.view(-1)[piece.in_tensor] = gradient[piece.in_chunk]
        try:
            self.optimizer.step()
        except Exception as error:
            raise UsageError(
                f"The outer optimizer {self._name} failed in step(): {error!r}; choose one whose "
                "step() needs nothing but the gradients."
            ) from error
        finally:
            for parameter in self._parameters:
                parameter.grad = None

    def _descend(
        self,
        masters: list[Tensor | None],
        gradients: Mapping[int, Tensor],
        fits: Callable[[ChunkSpan, Tensor], bool],
    ) -> bool:
        """theta <- theta - lr g, with the lr of each group."""
        moved = {}
        for index, gradient in gradients.items():
            values = _placed(masters, index).clone()
            for rate in self.rates(index):
                part = slice(rate.start, rate.stop)
                values[part].add_(gradient[part], alpha=-rate.lr)
            moved[index] = values
        if not all(fits(self._spans[index], values) for index, values in moved.items()):
            return False
        for index, values in moved.items():
            masters[index] = values
        self._load(masters, moved)
        return True

    def _is_state_finite(self) -> bool:
        """Whether all moments are: an enormous gradient can leave finite parameters behind, as when
        Adam divides by an infinite second moment, and would have stopped them for good."""
        return all(
            is_finite(value)
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor) and value.is_floating_point()
        )

    # What an operator sees and sets.

    def groups(self) -> list[OuterGroup]:
        """What each group says now."""
        return [
            OuterGroup(_number(group.get("lr")), _number(_momentum(group)))
            for group in self.optimizer.param_groups
        ]

    def tune(self, settings: Mapping[str, float]) -> None:
        """Give all groups this "lr" or "momentum" (beta 1, for Adam's kind); they have it."""
        for group in self.optimizer.param_groups:
            if "lr" in settings:
                group["lr"] = settings["lr"]
            if "momentum" in settings and "momentum" in group:
                group["momentum"] = settings["momentum"]
            elif "momentum" in settings:
                group["betas"] = (settings["momentum"], *group["betas"][1:])

    # Between chunks and the optimizer's tensors.

    @torch.no_grad()
    def _load(self, masters: list[Tensor | None], indices: Iterable[int]) -> None:
        """Copy chunks into the optimizer's parameters."""
        for index in indices:
            values = _placed(masters, index)
            for piece in self._pieces[index]:
                parameter = self._parameters[piece.parameter]
                parameter.view(-1)[piece.in_tensor] = values[piece.in_chunk]

    @torch.no_grad()
    def _cut(self, index: int) -> Tensor:
        """A chunk of the optimizer's parameters, in memory of its own: it will be handed out."""
        values = torch.empty(self._spans[index].elements)
        for piece in self._pieces[index]:
            flat = self._parameters[piece.parameter].reshape(-1)
            values[piece.in_chunk] = flat[piece.in_tensor]
        return values

    def place(self, index: int, masters: list[Tensor | None]) -> None:
        """Take over a chunk that was placed again: another worker provides the first version."""
        self._load(masters, [index])

    # The optimizer and its groups.

    def state_dict(self) -> dict[str, Any]:
        """A copy of the optimizer's state, which later steps do not change."""
        return copy.deepcopy(self.optimizer.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` gave, which is copied."""
        self.optimizer.load_state_dict(copy.deepcopy(state))

    @property
    def _name(self) -> str:
        return f"{type(self.optimizer).__name__} of fragment {self._parameters.fragment}"

    def _make(self) -> torch.optim.Optimizer:
        fragment = self._parameters.fragment
        wanted = "it must return a torch.optim.Optimizer over all parameters that it is given"
        try:
            made = self._outer.factory(self._parameters)
        except Exception as error:
            raise UsageError(
                f"outer_optimizer_factory failed for fragment {fragment} with "
                f"{len(self._parameters)} parameters: {error!r}; {wanted}."
            ) from error
        if not isinstance(made, torch.optim.Optimizer):
            raise UsageError(
                f"outer_optimizer_factory returned {type(made).__name__} for fragment {fragment}; "
                f"{wanted}."
            )
        self.optimizer = made
        try:
            json.dumps(made.state_dict()["param_groups"])
        except TypeError as error:
            raise UsageError(
                f"outer_optimizer_factory returned an optimizer whose settings cannot be saved "
                f"({error}); give plain numbers, such as lr=0.1 instead of a tensor."
            ) from None
        held = self._group_numbers()
        lacking = [name for name, p in self._parameters.named.items() if id(p) not in held]
        if lacking:
            raise UsageError(
                f"outer_optimizer_factory left {len(lacking)} of {len(self._parameters)} parameters "
                f"of fragment {fragment} out, the first is {lacking[0]}; {wanted}."
            )
        if self._outer.rule in ("direct", "paper"):
            for index in self._spans:
                self.rates(index)
        return made

    def _group_numbers(self) -> dict[int, int]:
        """Which group each parameter is in, by its `id`."""
        groups = enumerate(self.optimizer.param_groups)
        return {id(parameter): number for number, group in groups for parameter in group["params"]}

    def _groups_of(self, index: int) -> Iterator[tuple[_Piece, int, Mapping[str, Any]]]:
        numbers = self._group_numbers()
        for piece in self._pieces[index]:
            number = numbers[id(self._parameters[piece.parameter])]
            yield piece, number, self.optimizer.param_groups[number]

    def _value(self, number: int, group: Mapping[str, Any], what: str) -> float:
        """lr or momentum of a group; beta 1 is the momentum of Adam's kind."""
        found = _momentum(group) if what == "momentum" else group.get(what)
        if found is not None:
            return float(found)
        keys = "neither momentum nor betas" if what == "momentum" else f"no {what}"
        raise UsageError(
            f"Group {number} of {self._name} has {keys}, which --outer dn reads; choose an optimizer "
            "that has it, such as torch.optim.SGD."
        )


def _momentum(group: Mapping[str, Any]) -> Any:
    """Momentum of a group; beta 1 is that of Adam's kind. None where it has neither."""
    betas = group.get("betas")
    return group.get("momentum", betas[0] if betas else None)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def added(
    state: State, gradient: Tensor, new: Callable[[Tensor], Tensor] = torch.empty_like
) -> Tensor:
    """The buffer's sum with one more gradient, in a new tensor."""
    total = state.get(DELAYED)
    if total is None:
        return new(gradient).copy_(gradient)
    return torch.add(total, gradient, out=new(gradient))


def _totals(states: list[State], gradients: Mapping[int, Tensor]) -> dict[int, Tensor]:
    return {index: added(states[index], gradient) for index, gradient in gradients.items()}


def _are_finite(chunks: Mapping[int, Tensor]) -> bool:
    return all(is_finite(chunk) for chunk in chunks.values())


def _placed(masters: list[Tensor | None], index: int) -> Tensor:
    values = masters[index]
    assert values is not None, f"chunk {index} has no value yet"
    return values


def _pieces(places: list[Place], span: ChunkSpan) -> Iterator[_Piece]:
    for number, place in enumerate(places):
        start, stop = max(place.start, span.start), min(place.stop, span.stop)
        if start < stop:
            yield _Piece(
                number,
                slice(start - place.start, stop - place.start),
                slice(start - span.start, stop - span.start),
            )
