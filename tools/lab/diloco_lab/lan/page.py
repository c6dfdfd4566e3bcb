"""The tables in `tools/lab/LAN.md`, written from `lan.json` beside it, between its marks."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from diloco_lab.lan.records import BadFile, LanFile
from diloco_lab.lan.table import Table

# Tables that a page may ask for.
KEYS = (
    *("sync", "training", "heartbeats", "bytes"),
    *("streaming", "mixed"),
    *("plan", "plan-seconds", "costs"),
)
WHERE = "where"  # the block that says what machine it was
BLOCK = re.compile(r"<!-- table: (?P<key>[a-z-]+) -->\n.*?<!-- end -->", re.DOTALL)


def write(found: LanFile, tables: Iterable[Table], path: Path) -> None:
    """Put the tables of this file into the page.

    Raises:
        BadFile: there is no such page, or it asks for a table that there is not; the page is as it was.
    """
    try:
        page = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadFile(f"{path} cannot be read ({error.strerror})") from None
    path.write_text(filled(page, found, tables), encoding="utf-8")


def filled(page: str, found: LanFile, tables: Iterable[Table]) -> str:
    """The page with the tables of this file in its blocks; raises BadFile."""
    blocks = dict.fromkeys(KEYS, "Nothing was measured for this.")
    blocks |= {each.key: "\n".join(each.lines()) for each in tables}
    blocks[WHERE] = where(found)

    def block(match: re.Match[str]) -> str:
        key = match["key"]
        if key not in blocks:
            known = ", ".join(blocks)
            raise BadFile(f"the page asks for a table {key!r}, and there is {known}")
        return f"<!-- table: {key} -->\n{blocks[key]}\n<!-- end -->"

    return BLOCK.sub(block, page)


def where(found: LanFile) -> str:
    """What the numbers should be read with: machine, time, load."""
    about = found.machine
    loads = [each.load for each in found.measurements]
    times = sorted(each.at for each in found.measurements)
    versions = ", ".join(f"{name} {about.get(name)}" for name in ("kernel", "python", "torch"))
    load = f"{min(loads):.1f} to {max(loads):.1f} processes wanted a core"
    if about.get("nice", 0) < 0:
        load += ", behind those that measure"
    return (
        f"Measured on {about.get('cores')} cores of a machine ({about.get('processor')}, {versions})\n"
        f"from {times[0][:16]} to {times[-1][:16]}. In the minute before each measurement\n"
        f"{load}."
    )
