"""Any torch.optim optimizer as the outer optimizer.

A torch optimizer steps whole tensors, so a fragment's step begins when the last of its parameter chunks
has been reduced, and holds the thread for as long as the optimizer needs: this path is exempt from the
rule that work on tensors is cut in slices. It also costs one more copy of the parameters (the
optimizer's own, which it changes in place and nobody else ever sees) and, during a step, one of the
optimizer's state, so that a step whose result cannot be used leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from diloco_broker.tensors.outer.state import DELAYED, State, added
from diloco_broker.tensors.outer.torch_fragment import OuterOptimizerFactory, TorchFragment, placed
from diloco_protocol.chunks import ChunkSpan, FragmentLayout
from diloco_protocol.codecs import is_finite

Fits = Callable[[ChunkSpan, Tensor], bool]
"""Whether a chunk's new value can be sent."""

# Settings of the optimizer's groups that the steps of Delayed Nesterov read.
READ = {"direct": ("lr",), "paper": ("lr", "momentum")}


@dataclass(frozen=True)
class TorchOuter:
    """An outer optimizer made by a factory, and what it is used for.

    Attributes:
        factory: called once for each fragment.
        rule: "each" gradient goes through `optimizer.step()`; "fedbuff": the mean of each `size`
            does; "direct": that, and between them theta <- theta - lr g (see `chunked.DirectDelayed`);
            "paper": the optimizer is never stepped, its groups say lr and momentum of Delayed
            Nesterov (see `chunked.DelayedNesterov`), and its parameters keep their first values.
        size: N, gradients in a buffer.
        c: c of Delayed Nesterov.
    """

    factory: OuterOptimizerFactory
    rule: Literal["each", "fedbuff", "direct", "paper"] = "each"
    size: int = 1
    c: float = 0.0


class WholeTensors:
    """Steps one fragment with a torch optimizer, once the gradients of all its chunks are there.

    Args:
        outer: the factory, and what its optimizer is used for.
        layout: the fragment; it has parameters.
        masters: the fragment's chunks, all placed; copied.

    Attributes:
        fragment: the optimizer, and the parameters that it steps.

    Raises:
        UsageError: when the factory fails, or returns what cannot be used.
    """

    def __init__(
        self, outer: TorchOuter, layout: FragmentLayout, masters: list[Tensor | None]
    ) -> None:
        self._outer = outer
        self.fragment = TorchFragment(outer.factory, layout, masters, READ.get(outer.rule, ()))
        self._spans = self.fragment.spans
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
        fits: Fits,
    ) -> set[int]:
        """Take one gradient of the fragment.

        A chunk without a gradient keeps its value and its share of the buffer, which is applied at a
        boundary all the same; the optimizer sees a gradient of 0 where there is neither.

        Args:
            masters: the fragment's chunks; new tensors take their place.
            states: the buffers' sums; likewise.
            gradients: fp32, by chunk.
            count: gradients of this fragment before this one.
            fits: as it says.

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
        fits: Fits,
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
        fits: Fits,
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

    def _step(
        self,
        masters: list[Tensor | None],
        gradients: Mapping[int, Tensor],
        fits: Fits,
    ) -> bool:
        """`optimizer.step()`, if there is any gradient; undone when the result is not finite."""
        if not gradients:
            return True
        if not _are_finite(gradients):
            return False
        torch_ = self.fragment
        saved = torch_.state_dict()
        torch_.step(gradients)
        stepped = {index: torch_.cut(index) for index in gradients}
        is_good = torch_.is_state_finite() and all(
            fits(self._spans[index], values) for index, values in stepped.items()
        )
        if is_good:
            for index, values in stepped.items():
                masters[index] = values
            # Weight decay and momentum move what has no gradient, too.
            self.fragment.load(masters, self._spans.keys() - stepped.keys())
        else:
            torch_.load_state_dict(saved)
            self.fragment.load(masters, self._spans)
        return is_good

    def _descend(
        self,
        masters: list[Tensor | None],
        gradients: Mapping[int, Tensor],
        fits: Fits,
    ) -> bool:
        """theta <- theta - lr g, with the lr of each group."""
        moved = {}
        for index, gradient in gradients.items():
            values = placed(masters, index).clone()
            for rate in self.fragment.rates(index):
                part = slice(rate.start, rate.stop)
                values[part].add_(gradient[part], alpha=-rate.lr)
            moved[index] = values
        if not all(fits(self._spans[index], values) for index, values in moved.items()):
            return False
        for index, values in moved.items():
            masters[index] = values
        self.fragment.load(masters, moved)
        return True


def _totals(states: list[State], gradients: Mapping[int, Tensor]) -> dict[int, Tensor]:
    return {index: added(states[index], gradient) for index, gradient in gradients.items()}


def _are_finite(chunks: Mapping[int, Tensor]) -> bool:
    return all(is_finite(chunk) for chunk in chunks.values())
