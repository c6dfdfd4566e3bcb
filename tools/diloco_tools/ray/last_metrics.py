"""What an island reported last. Ray Train keeps metrics only with a checkpoint, which few need here."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from ray import train


class LastMetrics(train.UserCallback):  # type: ignore[misc]  # ray has no types for mypy
    """Writes what the first process of an island reports to a file, where the island is driven."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def after_report(
        self, run_context: object, metrics: list[dict[str, Any]], checkpoint: object
    ) -> None:
        aside = self._file.with_suffix(".new")
        with suppress(OSError):  # a full disk ends no training
            aside.write_text(json.dumps(metrics[0], default=str))
            aside.replace(self._file)


def last_metrics(file: Path) -> dict[str, Any] | None:
    """None where nothing was reported."""
    try:
        read: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return read
