"""Pseudo-gradients of all zeros: training goes on, and nothing is learnt. Pure."""

from __future__ import annotations


class Stillness:
    """Notices that a fragment was pushed twice in a row without having moved.

    Says so once, until every fragment has moved again.

    Args:
        num_fragments: P.
    """

    def __init__(self, num_fragments: int) -> None:
        self._num_fragments = num_fragments
        self._zeros: dict[int, int] = {}  # by fragment: pushes of zeros in a row
        self._is_told = False

    def pushed(self, fragment: int, norm: float | None, steps: int) -> str | None:
        """A pseudo-gradient is pushed. Returns a warning if it is time for one.

        Args:
            norm: Euclidean length of its parameters; None where that is not known.
            steps: optimizer steps in it; without any, zeros are no news.
        """
        if norm != 0:
            self._zeros.pop(fragment, None)
            self._is_told = self._is_told and bool(self._zeros)
            return None
        if not steps:
            return None
        self._zeros[fragment] = self._zeros.get(fragment, 0) + 1
        if self._zeros[fragment] < 2 or self._is_told:
            return None
        self._is_told = True
        whose = f"of fragment {fragment} " if self._num_fragments > 1 else ""
        return (
            f"The pseudo-gradient {whose}was all zeros twice in a row, the last time after {steps} "
            "optimizer steps: nothing is learnt there. Look for a learning rate of 0 (a scheduler), "
            "frozen parameters, an optimizer over other parameters than the model's, or updates too "
            "small for the model's dtype."
        )
