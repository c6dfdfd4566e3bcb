"""Pages whose tables are written from result files, between marks, so that the two never differ."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from diloco_lab.driver.records import BadFile
from diloco_lab.driver.tables import Table

WHERE = "where"  # the block that describes the machine
BLOCK = re.compile(r"<!-- table: (?P<key>[a-z-]+) -->\n.*?<!-- end -->", re.DOTALL)


def blocks_of(keys: Sequence[str], tables: Iterable[Table], where: str) -> dict[str, str]:
    """The blocks that a page may ask for; `keys` are those of all tables, measured or not."""
    blocks = dict.fromkeys(keys, "Nothing was measured for this.")
    blocks |= {each.key: "\n".join(each.lines()) for each in tables}
    return blocks | {WHERE: where}


def write(path: Path, blocks: Mapping[str, str]) -> None:
    """Replace the blocks of a page.

    Raises:
        BadFile: the page is missing, or asks for an unknown block; it is left unchanged.
    """
    try:
        page = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadFile(f"{path} cannot be read ({error.strerror})") from None
    path.write_text(filled(page, blocks), encoding="utf-8")


def filled(page: str, blocks: Mapping[str, str]) -> str:
    """The page with these blocks between its marks; raises BadFile."""

    def block(match: re.Match[str]) -> str:
        key = match["key"]
        if key not in blocks:
            known = ", ".join(blocks)
            raise BadFile(f"the page asks for a table {key!r}, and there is {known}")
        return f"<!-- table: {key} -->\n{blocks[key]}\n<!-- end -->"

    return BLOCK.sub(block, page)


def where(
    machine: Mapping[str, Any], times: Iterable[str], loads: Iterable[float], of_each: str
) -> str:
    """Machine, time and load of the measurements; the load is that before each of them (`of_each`)."""
    at, seen = sorted(times), sorted(loads)
    versions = ", ".join(f"{name} {machine.get(name)}" for name in ("kernel", "python", "torch"))
    load = f"{seen[0]:.1f} to {seen[-1]:.1f}" if seen else "an unknown number of"
    behind = ", behind those that measure" if machine.get("nice", 0) < 0 else ""
    kind = f"{machine.get('processor')}, {versions}"
    return (
        f"Measured on {machine.get('cores')} cores of a machine ({kind})\n"
        f"from {at[0][:16]} to {at[-1][:16]}. In the minute before each {of_each}\n"
        f"{load} processes wanted a core{behind}."
    )
