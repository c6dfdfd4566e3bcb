"""Faults that the mutation drill puts in: are they what they say, and one at a time?"""

from __future__ import annotations

import ast

import pytest
from mutation.operators import mutants, mutated

FAULTS = [
    ("x = a < b", "x = a <= b"),
    ("x = a is None", "x = a is not None"),
    ("x = a and b", "x = a or b"),
    ("x = not a", "x = a"),
    ("x = a - b", "x = a + b"),
    ("x += a", "x -= a"),
    ("x = True", "x = False"),
    ("x = 3", "x = 4"),
    ("x = min(a, b)", "x = max(a, b)"),
    ("x = a if b else c", "x = a"),
    ("act(a)", "pass"),
]


@pytest.mark.parametrize(("source", "faulty"), FAULTS)
def test_fault_is_the_small_change_that_it_says(source: str, faulty: str) -> None:
    (mutant,) = mutants("m", source)
    assert (mutant.line, mutant.statement) == (1, 1)
    assert ast.unparse(mutated(source, mutant.number)) == faulty


def test_each_fault_is_put_in_alone_and_at_its_line() -> None:
    source = "def f(a):\n    if a > 1:\n        g(a)\n    return (\n        a + 2\n    )"
    found = mutants("m", source)
    assert [(each.line, each.statement) for each in found] == [
        (2, 2),
        (2, 2),
        (2, 2),
        (3, 3),
        (4, 4),
        (5, 4),
        (5, 4),
    ]
    sources = {ast.unparse(mutated(source, each.number)) for each in found}
    assert len(sources) == len(found) and ast.unparse(ast.parse(source)) not in sources


@pytest.mark.parametrize(
    "source",
    [
        '"""Text."""',
        "from a import b",
        "Event = Push | Pull | Leave",
        "def f(x: int = 3) -> int | None: ...",
        "raise Refused(f'{1 + 1} of them')",
        "assert a < b",
        "logger.warning('%d', 1)",
        "def check_invariants(self):\n    if a < b:\n        act()",
    ],
)
def test_what_is_only_said_has_no_fault(source: str) -> None:
    assert [m.what for m in mutants("m", source) if m.what != "3  ->  4"] == []
