"""Splits of a model into fragments, their schedule, and their presentation."""

from diloco_protocol.fragments.own_split import OwnSplit
from diloco_protocol.fragments.patterns import PATTERNS, block_of, unit_of
from diloco_protocol.fragments.plan import OWN, Choose, FragmentPlan, PlanView, longest_delay, slots

__all__ = [
    "Choose",
    "FragmentPlan",
    "OWN",
    "OwnSplit",
    "PATTERNS",
    "PlanView",
    "block_of",
    "longest_delay",
    "slots",
    "unit_of",
]
