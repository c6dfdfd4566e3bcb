"""One table, for the terminal and for a page; and how numbers stand in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich import box
from rich.table import Table as RichTable

from diloco_lab.bench.sizes import SIZES, parameters_of

NOTHING = "-"  # a cell for which there is no number


@dataclass(frozen=True)
class Table:
    """Cells are text; the first `labels` columns say what a row is of. The page names it by its key."""

    key: str
    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    labels: int = 1
    notes: tuple[str, ...] = ()

    def for_terminal(self) -> RichTable:
        shown = RichTable(
            title=self.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
        )
        for number, name in enumerate(self.head):
            is_label = number < self.labels
            shown.add_column(name, justify="left" if is_label else "right", no_wrap=is_label)
        for row in self.rows:
            shown.add_row(*row)
        return shown

    def lines(self) -> Iterator[str]:
        """Of a Markdown page, without an empty one at either end."""
        yield f"| {' | '.join(self.head)} |"
        yield f"|{' --- |' * len(self.head)}"
        for row in self.rows:
            yield f"| {' | '.join(row)} |"
        for note in self.notes:
            yield ""
            yield note


def size_of(parameters: int) -> str:
    """The name of a model of the benchmark; of others about how many parameters it has."""
    for name in SIZES:
        if parameters_of(name) == parameters:
            return name
    return f"{parameters / 1e6:.3g}M"


def seconds(value: float) -> str:
    """With three digits.

    >>> seconds(0.0834), seconds(12.345), seconds(164.2)
    ('0.083 s', '12.3 s', '164 s')
    """
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 0.1 else 3
    return f"{value:.{digits}f} s"


def percent(share: float) -> str:
    """Closer to 100 the more digits, so that 99.9 and 100 are not the same.

    >>> percent(0.934), percent(0.99523), percent(0.99996)
    ('93.4%', '99.5%', '99.996%')
    """
    if share >= 0.9995:
        return f"{100 * min(share, 0.99999):.3f}%"
    return f"{100 * share:.1f}%"
