"""Advice about the outer optimizer's learning rate and H, from published runs. Pure."""

from __future__ import annotations

from diloco_protocol.quantities import plural

# Best learning rate of Nesterov's outer optimizer by number of workers, at `STEPS` steps a round and
# 335M parameters or more (arXiv 2503.09799). It rises with workers and H, and not with the model.
RATES = {1: 0.4, 2: 0.6, 4: 0.6, 8: 0.8}
STEPS, SOURCE = 30, "arXiv 2503.09799"
FEWEST_STEPS = 24  # below, the updates of consecutive rounds are too alike for Nesterov's momentum
FAR_OFF = 4 / 3  # a factor within which a learning rate needs no remark


def _measured(workers: int) -> int:
    """The largest number of workers up to this one that was measured."""
    return max(each for each in RATES if each <= max(1, workers))


def outer_rate(workers: int) -> float:
    """The best rate at `STEPS`."""
    return RATES[_measured(workers)]


def _bound(workers: int, steps: int) -> str:
    """Where the best rate lies for this H, relative to `outer_rate`."""
    if steps < STEPS:
        return "about" if workers > max(RATES) else "at most"
    return "at least" if steps > STEPS or workers > max(RATES) else "about"


def recommended(workers: int, steps: int) -> str:
    """The recommended outer learning rate for a number of workers and H."""
    rate, like, bound = outer_rate(workers), _measured(workers), _bound(workers, steps)
    measured = f"{rate:g} for {plural(like, 'worker')} at H = {STEPS}, {SOURCE}"
    above = "; above 1 can be right" if bound == "at least" and like > 1 else ""
    return f"{bound} {rate:g} ({measured}{above})"


def rate_far_off(rate: float, workers: int, steps: int) -> str | None:
    """A sentence if this outer learning rate is far from the recommended one."""
    best, bound = outer_rate(workers), _bound(workers, steps)
    is_high = rate > best * FAR_OFF and bound != "at least"
    is_low = rate * FAR_OFF < best and bound != "at most"
    if not (is_high or is_low):
        return None
    return f"The outer learning rate is {rate:g}; recommended: {recommended(workers, steps)}."


def small_h(steps: int) -> str | None:
    """A sentence if a round has too few steps for Nesterov's momentum."""
    if steps >= FEWEST_STEPS:
        return None
    return (
        f"H = {steps} is small for outer momentum: updates of consecutive rounds are alike, and "
        "Nesterov 0.7/0.9 overshoots (at H = 2 the loss is 9% higher, with a plain average 3%). Use "
        f"H = {FEWEST_STEPS} or more, or --preset finetune."
    )
