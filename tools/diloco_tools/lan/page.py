"""The tables in `tools/LAN.md`, written from `tools/lan.json` between its marks: they never differ."""

from __future__ import annotations

import re
from pathlib import Path

from diloco_tools.lan.records import BadFile, LanFile
from diloco_tools.lan.tables import KEYS, tables

WHERE = "where"  # the block that says what machine it was
BLOCK = re.compile(r"<!-- table: (?P<key>[a-z-]+) -->\n.*?<!-- end -->", re.DOTALL)


def write(found: LanFile, path: Path) -> None:
    """Put the numbers of this file into the page.

    Raises:
        BadFile: there is no such page, or it asks for a table that there is not; the page is as it was.
    """
    try:
        page = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadFile(f"{path} cannot be read ({error.strerror})") from None
    path.write_text(filled(page, found), encoding="utf-8")


def filled(page: str, found: LanFile) -> str:
    """The page with the numbers of this file in its blocks; raises BadFile."""
    blocks = dict.fromkeys(KEYS, "Nothing was measured for this.")
    blocks |= {each.key: "\n".join(each.lines()) for each in tables(found.measurements)}
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
    return (
        f"Measured on {about.get('cores')} cores of a machine ({about.get('processor')}, {versions})\n"
        f"from {times[0][:16]} to {times[-1][:16]}. In the minute before each measurement\n"
        f"{load}, those of the measurement before it among them."
    )
