"""Tables of results, for the terminal and for pages, and the numbers in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

NOTHING = "-"  # a cell for which there is no number


@dataclass(frozen=True)
class Table:
    """Cells are text; the first `labels` columns describe a row. A page asks for it by its key."""

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


def show(tables: Iterable[Table], console: Console) -> None:
    """Print tables with their notes."""
    for each in tables:
        console.print()
        console.print(each.for_terminal())
        for note in each.notes:
            console.print(note, soft_wrap=True)


def rate_of(bits_per_s: float) -> str:
    """In words.

    >>> rate_of(1e9), rate_of(5e7)
    ('1 Gb/s', '50 Mb/s')
    """
    return f"{bits_per_s / 1e9:g} Gb/s" if bits_per_s >= 1e9 else f"{bits_per_s / 1e6:g} Mb/s"


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
