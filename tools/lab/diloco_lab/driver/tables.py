"""Tables of results, for the terminal and for pages, and the numbers in them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from diloco_lab.driver.records import BadFile

R = TypeVar("R")
NOTHING = "-"  # an empty cell


@dataclass(frozen=True)
class Table:
    """Cells are text; the first `labels` columns describe a row. A page asks for it by its key."""

    key: str
    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    labels: int = 1
    notes: tuple[str, ...] = ()

    def __rich__(self) -> RichTable:
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
        """The lines of a Markdown page, without an empty one at either end."""
        head = (", ".join(name.split("\n")) for name in self.head)
        yield f"| {' | '.join(head)} |"
        yield f"|{' --- |' * len(self.head)}"
        for row in self.rows:
            yield f"| {' | '.join(row)} |"
        for note in self.notes:
            yield ""
            yield note


def table_of(
    key: str,
    title: str,
    columns: Mapping[str, Callable[[R], str]],
    rows: Iterable[R],
    *,
    labels: int = 1,
    notes: Iterable[str] = (),
) -> Table:
    """A table with a row for each of these; a column is its head and a function from row to cell."""
    cells = tuple(tuple(cell(row) for cell in columns.values()) for row in rows)
    return Table(key, title, tuple(columns), cells, labels, tuple(notes))


def show(tables: Iterable[Table], console: Console) -> None:
    """Print tables with their notes."""
    for each in tables:
        console.print()
        console.print(each)
        for note in each.notes:
            console.print(note, soft_wrap=True)


def rate_of(bits_per_s: float) -> str:
    """A rate in words.

    >>> rate_of(1e9), rate_of(5e7)
    ('1 Gb/s', '50 Mb/s')
    """
    return f"{bits_per_s / 1e9:g} Gb/s" if bits_per_s >= 1e9 else f"{bits_per_s / 1e6:g} Mb/s"


def seconds(value: float) -> str:
    """Seconds with three digits.

    >>> seconds(0.0834), seconds(12.345), seconds(164.2)
    ('0.083 s', '12.3 s', '164 s')
    """
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 0.1 else 3
    return f"{value:.{digits}f} s"


def percent(share: float) -> str:
    """A percentage, with more digits near 100, so that 99.9 and 100 differ.

    >>> percent(0.934), percent(0.99523), percent(0.99996)
    ('93.4%', '99.5%', '99.996%')
    """
    if share >= 0.9995:
        return f"{100 * min(share, 0.99999):.3f}%"
    return f"{100 * share:.1f}%"


WHERE = "where"  # the block that describes the machine


def blocks_of(keys: Sequence[str], tables: Iterable[Table], where: str) -> dict[str, str]:
    """The blocks that a page may ask for; `keys` are those of all tables, measured or not."""
    blocks = dict.fromkeys(keys, "Nothing was measured for this.")
    blocks |= {each.key: "\n".join(each.lines()) for each in tables}
    return blocks | {WHERE: where}


def blocks_in(experiment: str = "") -> re.Pattern[str]:
    """The blocks of a page; those of one experiment, where a page has several."""
    mark = experiment and f"{experiment}/"
    return re.compile(rf"<!-- table: {mark}(?P<key>[a-z-]+) -->\n.*?<!-- end -->", re.DOTALL)


def write_page(path: Path, blocks: Mapping[str, str], experiment: str = "") -> None:
    """Replace the blocks of a page.

    Raises:
        BadFile: the page is missing, or asks for an unknown block; it is left unchanged.
    """
    try:
        page = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadFile(f"{path} cannot be read ({error.strerror})") from None
    path.write_text(filled(page, blocks, experiment), encoding="utf-8")


def filled(page: str, blocks: Mapping[str, str], experiment: str = "") -> str:
    """The page with these blocks between its marks; raises BadFile."""

    def block(match: re.Match[str]) -> str:
        key = match["key"]
        if key not in blocks:
            known = ", ".join(blocks)
            raise BadFile(f"the page asks for a table {key!r}, and there is {known}")
        mark, _, _ = match[0].partition("\n")
        return f"{mark}\n{blocks[key]}\n<!-- end -->"

    return blocks_in(experiment).sub(block, page)


def where_measured(
    machine: Mapping[str, Any], times: Iterable[str], loads: Iterable[float], of_each: str
) -> str:
    """Machine, time and load of the measurements; the load is that before each of them (`of_each`)."""
    at, seen = sorted(times), sorted(loads)
    versions = ", ".join(f"{name} {machine.get(name)}" for name in ("kernel", "python", "torch"))
    load = f"{seen[0]:.1f} to {seen[-1]:.1f}" if seen else "an unknown number of"
    behind = ", at a lower priority than those that measure" if machine.get("nice", 0) < 0 else ""
    kind = f"{machine.get('processor')}, {versions}"
    return (
        f"Measured on {machine.get('cores')} cores of a machine ({kind})\n"
        f"from {at[0][:16]} to {at[-1][:16]}. In the minute before each {of_each}\n"
        f"{load} processes waited for a core{behind}."
    )
