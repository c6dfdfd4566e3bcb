"""Uses any torch.optim optimizer as the outer optimizer.

A torch optimizer steps whole tensors, so a fragment's step starts when the last of its parameter chunks
is reduced, and blocks the thread for its entire duration; other tensor work is done in slices. It also
needs another copy of the parameters, which the optimizer changes in place and no reader sees, and during
a step a copy of the optimizer's state, so that a step with an unusable result has no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from diloco_broker.tensors.outer.chunked import DELAYED, State, added
from diloco_broker.tensors.outer.torch_fragment import OuterOptimizerFactory, TorchFragment
from diloco_protocol.chunks import ChunkSpan, FragmentLayout
from diloco_protocol.tensors.codecs import is_finite


@dataclass(frozen=True)
class TorchOuter:
    """An outer optimizer made by a factory; it steps with the mean of every `size` gradients."""

    factory: OuterOptimizerFactory  # called once for each fragment
    size: int = 1  # N, gradients in a buffer


class WholeTensors:
    """Steps one fragment with a torch optimizer, once the gradients of all its chunks have arrived.

    A step replaces the tensors in `masters`, the fragment's chunks, and in `states`, the buffers' sums.
    `fits` returns whether a chunk's new value can be sent.
    """

    def __init__(
        self,
        outer: TorchOuter,
        layout: FragmentLayout,
        masters: list[Tensor | None],
        states: list[State],
        fits: Callable[[ChunkSpan, Tensor], bool],
    ) -> None:
        self._outer = outer
        self._masters = masters
        self._states = states
        self._fits = fits
        self.fragment = TorchFragment(outer.factory, layout, masters)
        self._spans = self.fragment.spans
        self._awaited = set(self._spans)
        self._turns: list[dict[int, Tensor]] = []

    # Collecting a step's gradients.

    def collect(self, index: int, gradients: list[Tensor | None]) -> list[dict[int, Tensor]] | None:
        """Keep the gradients of a chunk, one for each turn; None for a turn without a gradient.

        Returns:
            The gradients by chunk for each turn, after the last chunk; until then None.
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

    def advance(self, gradients: Mapping[int, Tensor], count: int, factor: float = 1.0) -> set[int]:
        """Take one gradient of the fragment, by chunk; `count` gradients precede it.

        `factor` scales the learning rate of its groups.

        A chunk without a gradient keeps its value and its part of the buffer, which is still applied at
        a boundary; without either, the optimizer gets a gradient of 0.

        Returns:
            Chunks whose gradient or buffer was left out because a result was not finite; it then has no
            effect.
        """
        if self._outer.size == 1:
            return set() if self._step(gradients, factor) else set(gradients)
        if (count + 1) % self._outer.size == 0:
            return self._empty(gradients, factor)
        totals = self._totals(gradients)
        if not _are_finite(totals):
            return set(gradients)
        for index, total in totals.items():
            self._states[index] = {DELAYED: total}
        return set()

    def _empty(self, gradients: Mapping[int, Tensor], factor: float) -> set[int]:
        """Step with the mean of the buffer at a boundary, without this gradient if it is unusable.

        The count increases in any case: gradients left in the buffer would be divided by N together with
        the next N gradients. So a buffer that overflows without this gradient is discarded.
        """
        size, states = self._outer.size, self._states
        held = {index: states[index][DELAYED] for index in self._spans if DELAYED in states[index]}
        totals = held | self._totals(gradients)
        left_out: set[int] = set()
        if not self._step({i: total / size for i, total in totals.items()}, factor):
            left_out |= gradients.keys()
            if not self._step({i: total / size for i, total in held.items()}, factor):
                left_out |= held.keys()
        for index in held:
            states[index] = {}
        return left_out

    def _totals(self, gradients: Mapping[int, Tensor]) -> dict[int, Tensor]:
        return {index: added(self._states[index], each) for index, each in gradients.items()}

    def _step(self, gradients: Mapping[int, Tensor], factor: float) -> bool:
        """Call `optimizer.step()` if there is a gradient; undo it if the result is not finite."""
        if not gradients:
            return True
        if not _are_finite(gradients):
            return False
        fragment = self.fragment
        saved = fragment.state_dict()
        fragment.step(gradients, factor)
        stepped = {index: fragment.cut(index) for index in gradients}
        if fragment.is_state_finite() and self._keep(stepped):
            # Restore chunks without a gradient: weight decay and momentum have moved them too.
            fragment.load(self._masters, self._spans.keys() - stepped.keys())
            return True
        fragment.load_state_dict(saved)
        fragment.load(self._masters, self._spans)
        return False

    def _keep(self, values: Mapping[int, Tensor]) -> bool:
        """Replace chunks by these values, if all of them can be sent."""
        if not all(self._fits(self._spans[index], each) for index, each in values.items()):
            return False
        for index, each in values.items():
            self._masters[index] = each
        return True


def _are_finite(chunks: Mapping[int, Tensor]) -> bool:
    return all(is_finite(chunk) for chunk in chunks.values())
