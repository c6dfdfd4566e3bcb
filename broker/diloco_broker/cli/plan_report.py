"""Formats a fragment plan as a table of 80 columns with advice, or as JSON."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from diloco_protocol.fragments import PATTERNS, FragmentPlan, PlanView, block_of, unit_of
from diloco_protocol.manifest import Kind, Manifest
from diloco_protocol.quantities import estimate

WIDTH = 80
# Ratio of the largest fragment to the mean up to which a plan counts as even. Peak traffic grows with
# it.
EVEN = 1.25
# Another pattern is suggested if its ratio is below this factor of the plan's.
BETTER = 0.9


@dataclass(frozen=True)
class Planned:
    """A plan to report."""

    source: str  # the file, the checkpoint or the broker
    manifest: Manifest
    plan: FragmentPlan
    pattern: str  # "own" for a custom split
    view: PlanView
    notes: tuple[str, ...] = ()  # assumptions, as sentences


def as_json(planned: Planned) -> dict[str, Any]:
    """The report as JSON, for programs."""
    view = planned.view
    return {
        "model": planned.source,
        "trainable_parameters": planned.manifest.trainable_elements,
        "num_fragments": planned.plan.num_fragments,
        "pattern": planned.pattern,
        **asdict(view),
        "imbalance": round(view.imbalance, 4),
        "imbalance_of_patterns": {name: round(x, 4) for name, x in _patterns(planned).items()},
        "advice": advice(planned),
        "notes": list(planned.notes),
    }


def as_text(planned: Planned, *, every_parameter: bool = False) -> str:
    """The report as text: a table, the blocks (or every parameter) of each fragment, and advice."""
    view, manifest = planned.view, planned.manifest
    total = manifest.trainable_elements
    tensors = sum(entry.kind is Kind.TRAINABLE for entry in manifest.entries)
    pieces = planned.plan.num_fragments
    lines = [
        *_wrapped(f"{planned.source}: {total:,} trainable parameters in {tensors} tensors"),
        f"{pieces} fragment{'s'[: pieces != 1]}, {planned.pattern}; sync-every {view.sync_every}; "
        f"up in {view.wire_dtype}, down in {view.reply_dtype}",
        "",
        _row("fragment", "tensors", "parameters", "share", "up", "down", "after step"),
    ]
    for each in view.fragments:
        count, elements, share = len(each.parameters), each.elements, each.elements / total
        up, down = estimate(each.bytes_up, "B"), estimate(each.bytes_down, "B")
        due = _steps(each.due, view.sync_every)
        lines.append(_row(each.fragment, count, f"{elements:,}", f"{share:.1%}", up, down, due))
    lines.append("")
    if every_parameter:
        lines += [
            f"{each.fragment:>3}  {parameter.elements:>15,}  {parameter.name}"
            for each in view.fragments
            for parameter in each.parameters
        ]
    else:
        lines += _blocks(planned)
    lines.append("")
    for sentence in (*advice(planned), *planned.notes):
        lines += _wrapped(sentence)
    return "\n".join(lines)


def advice(planned: Planned) -> list[str]:
    """Sentences on how even the fragments are, and on how to improve it."""
    view, pieces = planned.view, planned.plan.num_fragments
    if pieces == 1:
        return [f"One fragment: the entire model is sent every {view.sync_every} steps."]
    others = {name: x for name, x in _patterns(planned).items() if name != planned.pattern}
    compared = ", ".join(f"{name} {x:.2f}" for name, x in others.items())
    found = [f"The largest fragment is {view.imbalance:.2f} times the mean ({compared})."]
    trained = [e for e in planned.manifest.entries if e.kind is Kind.TRAINABLE]
    largest = max(trained, key=lambda entry: entry.elements)
    total = planned.manifest.trainable_elements
    best = min(others, key=others.__getitem__)
    if view.imbalance > EVEN and others[best] < BETTER * view.imbalance:
        found.append(
            f"If the link is your bottleneck, use --fragment-pattern {best}, which is more even: the "
            "largest fragment determines peak traffic and the time that a delay must hide."
        )
    elif view.imbalance <= EVEN:
        found.append("This is even enough.")
    if largest.elements * pieces > EVEN * total:
        most = max(1, total // largest.elements)
        found.append(
            f"{largest.name} alone is {largest.elements * pieces / total:.2f} times the mean, and "
            f"tensors are not split: more than {most} fragments do not make the largest smaller."
        )
    return found


def _patterns(planned: Planned) -> dict[str, float]:
    """The imbalance of each pattern with the same number of fragments."""
    view, found = planned.view, {}
    for pattern in PATTERNS:
        plan = FragmentPlan.of(planned.manifest, planned.plan.num_fragments, pattern)
        each = plan.view(planned.manifest, view.sync_every, view.wire_dtype, view.reply_dtype)
        found[pattern] = each.imbalance
    return found


def _row(*cells: object) -> str:
    return "{:>8} {:>7} {:>15} {:>6} {:>9} {:>9}  {}".format(*cells).rstrip()


def _steps(due: int, sync_every: int) -> str:
    """The first one or two steps after which a fragment is due, as the column width allows."""
    two = f"{due}, {due + sync_every}, ..."
    return two if len(two) < 20 else f"{due}, ..."


def _blocks(planned: Planned) -> list[str]:
    """The blocks and modules of each fragment; a star marks a partial one."""
    tensors = Counter(unit_of(name) for names in planned.plan.fragments for name in names)
    lines, has_parts = [], False
    for each in planned.view.fragments:
        here = Counter(unit_of(parameter.name) for parameter in each.parameters)
        parts = {unit: count < tensors[unit] for unit, count in here.items()}
        has_parts = has_parts or any(parts.values())
        text = ", ".join(_joined(parts))
        lines += _wrapped(f"{each.fragment:>3}  {text}", indent=5)
    if has_parts:
        lines += _wrapped("  *  in part; --parameters lists every tensor", indent=5)
    return lines


def _joined(parts: Mapping[str, bool]) -> list[str]:
    """Names of units, with consecutive ones of one list joined: model.layers.0 2 4."""
    found: list[str] = []
    before = None
    for unit, is_part in parts.items():
        stem, _, number = unit.rpartition(".")
        star = "*" if is_part else ""
        in_list = block_of(unit + ".") is not None and number.isdecimal()
        if in_list and stem == before:
            found[-1] += f" {number}{star}"
        else:
            found.append((unit or "(top level)") + star)
        before = stem if in_list else None
    return found


def _wrapped(text: str, indent: int = 0) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False
    )
