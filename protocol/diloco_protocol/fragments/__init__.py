"""Splits of a model into fragments, their schedule, and their presentation."""

from diloco_protocol.fragments.own_split import OwnSplit
from diloco_protocol.fragments.patterns import PATTERNS, block_of, unit_of
from diloco_protocol.fragments.plan import OWN, Choose, FragmentPlan, longest_delay, slots
from diloco_protocol.fragments.view import PlanView

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
