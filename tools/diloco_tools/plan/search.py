"""Search for the mildest H, P, tau and codecs that reach a share of time in training.

Mild settings change training least. H stays as given while another change is enough: first codecs
without a noticeable loss (bf16, then int8 both ways), then fragments, which are merged some steps late,
then four bits, then both. A merge later than a twentieth of H is not mild: an earlier one is preferred.
Only if none of these is enough, H grows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from diloco_protocol.dtypes import SIZES
from diloco_protocol.errors import UsageError
from diloco_protocol.fragments import longest_delay
from diloco_tools.plan.answer import Answer, answer
from diloco_tools.plan.question import Question
from diloco_tools.plan.simulated.costs import Costs

# Codecs of pushes and replies, from the most exact to the smallest. After each group the same codecs
# are tried with fragments.
MILD = (("bf16", "fp32"), ("bf16", "bf16"), ("int8", "int8"))
FEW = (("int4", "int4"), ("int4z", "int4z"))
FRAGMENTS = 4
LATE = 1 / 20  # of H: Streaming DiLoCo merges 1 to 5 steps of 100 late (arXiv 2501.18512)
MOST_STEPS = 1_000_000  # largest H of an answer
PIECES = 8  # of a fragment: a search simulates dozens of runs
GUESSES = 6  # attempts with a larger H if the first guess was too small


@dataclass(frozen=True)
class Option:
    """A setting, its answer with the given H, and the least H that reaches the share."""

    answer: Answer
    needed: int | None  # None: none below `MOST_STEPS`

    @property
    def question(self) -> Question:
        return self.answer.question

    @property
    def late(self) -> int:
        """Steps from a push to the merge of its reply, with the given H."""
        question = self.question
        if question.delay_steps is not None:
            return question.delay_steps
        steps = math.ceil(self.answer.measured.exchange_s / question.step_s)
        return max(1, min(steps, question.waits_after))

    @property
    def is_mild(self) -> bool:
        return self.late <= max(1.0, LATE * self.question.sync_every)


@dataclass(frozen=True)
class Found:
    """The settings, mildest first, and the best one; None if none reaches the target."""

    target: float
    options: tuple[Option, ...]
    best: Option | None

    @property
    def steps(self) -> int | None:
        """The H of the best setting: the given one if that is enough."""
        if self.best is None:
            return None
        asked = self.best.question.sync_every
        return asked if self.best.answer.utilisation >= self.target else self.best.needed


def search(question: Question, target: float, costs: Costs | None = None) -> Found:
    """Search for the mildest setting that reaches this share of the time."""
    options = []
    for candidate in candidates(question):
        try:
            found = answer(candidate, costs, PIECES)
        except UsageError:  # too slow for any connection
            continue
        options.append(Option(found, least_steps(found, target, costs)))
    enough = [each for each in options if each.answer.utilisation >= target]
    within = [each for each in options if each.needed is not None]
    enough.sort(key=lambda each: not each.is_mild)
    best = next(iter(enough), None) or min(within, key=lambda each: each.needed or 0, default=None)
    return Found(target, tuple(options), best)


def candidates(question: Question) -> Iterator[Question]:
    """The question as given, then changed settings, mildest first."""
    yield question
    seen = {_size(question)}
    pieces = question.fragments if question.fragments > 1 else FRAGMENTS
    has_fragments = question.fragments > 1 and question.delay_steps is None
    can_split = question.sync_every >= pieces and question.parameters >= pieces

    def in_fragments(each: Question) -> Question:
        return replace(each, fragments=pieces, delay_steps=None)

    milder = [(question.wire_dtype, question.reply_dtype)]
    for group in (MILD, FEW):
        for wire, reply in group:
            if _bytes(wire, reply) < min(seen) - 1e-9:
                seen.add(_bytes(wire, reply))
                milder.append((wire, reply))
                yield replace(question, wire_dtype=wire, reply_dtype=reply)
        if can_split and not has_fragments:
            for wire, reply in milder:
                yield in_fragments(replace(question, wire_dtype=wire, reply_dtype=reply))
        milder.clear()


def _size(question: Question) -> float:
    return _bytes(question.wire_dtype, question.reply_dtype)


def _bytes(wire: str, reply: str) -> float:
    return SIZES[wire].element + SIZES[reply].element


def least_steps(found: Answer, target: float, costs: Costs | None = None) -> int | None:
    """The least H with which this setting reaches the share, approximately if training overlaps; None
    if it is beyond `MOST_STEPS`.
    """
    question = found.question
    for _ in range(GUESSES):
        steps = _guess(found, target)
        if steps is None or steps == found.question.sync_every:
            return steps
        tried = answer(replace(question, sync_every=steps), costs, PIECES)
        if tried.utilisation >= target * (1 - 1e-6):
            return steps
        found = tried
    return None


def _guess(found: Answer, target: float) -> int | None:
    """The least H if exchanges take as long as in `found`: see `fragments.longest_delay`."""
    question = found.question
    fewest = question.fragments * ((question.delay_steps or 0) + 1)
    step_s, pieces = question.step_s, question.fragments
    exchange = found.measured.exchange_s
    hidden = min(exchange, question.waits_after * step_s)
    # Waiting beyond the exchanges: the work of the training thread.
    besides = max(0.0, found.waits_s - pieces * (exchange - hidden))

    def is_enough(steps: int) -> bool:
        delay = (
            longest_delay(steps, pieces) if question.delay_steps is None else question.delay_steps
        )
        waits = besides + pieces * max(0.0, exchange - delay * step_s)
        return steps * step_s >= target * (steps * step_s + waits) * (1 - 1e-9)

    least, most = fewest, MOST_STEPS
    if not is_enough(most):
        return None
    while least < most:
        middle = (least + most) // 2
        if is_enough(middle):
            most = middle
        else:
            least = middle + 1
    return least
