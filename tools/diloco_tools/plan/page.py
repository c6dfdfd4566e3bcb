"""The table of measured and predicted rounds in `docs/performance.md`, written from the results."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diloco_protocol.errors import UsageError
from diloco_tools.plan.validation import OF_THE_CORES, Row, as_markdown

BLOCK = re.compile(r"<!-- validation -->\n.*?<!-- end -->", re.DOTALL)


def filled(page: str, found: Sequence[Row], recorded: Mapping[str, Any]) -> str:
    """The page with these rows between its marks. Raises UsageError where it has none."""
    if BLOCK.search(page) is None:
        raise UsageError(
            "The page has no place for the table: <!-- validation --> and <!-- end -->."
        )
    machine = recorded["machine"]
    where = (
        f"Measured on {machine.get('cores')} cores ({machine.get('processor')}) that had other work, "
        f"too: see the load below.\nThe planner is told that the run had {OF_THE_CORES:.0%} of them."
    )
    block = f"<!-- validation -->\n{where}\n\n{as_markdown(found)}\n<!-- end -->"
    return BLOCK.sub(lambda _: block, page)


def write(path: Path, found: Sequence[Row], recorded: Mapping[str, Any]) -> None:
    """Put the rows into the page. Raises UsageError; the page is as it was then."""
    try:
        page = path.read_text(encoding="utf-8")
        path.write_text(filled(page, found, recorded), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from None
