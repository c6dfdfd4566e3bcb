"""The file in which a standby records its name, its hub's settings, and its takeover."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from diloco_broker.storage import checkpoint
from diloco_protocol.errors import ProtocolError, UsageError
from diloco_protocol.records import from_plain

FILE = "standby.json"


@dataclass(frozen=True)
class StandbyRecord:
    """`term` is that of its takeover, None before one; `settings` are the hub's last ones."""

    name: str
    term: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


def read_standby(folder: Path) -> StandbyRecord | None:
    """Read the record; None if there is none. Raises UsageError if it is damaged."""
    path = folder / FILE
    try:
        record = from_plain(StandbyRecord, json.loads(path.read_text()), FILE, lenient=True)
        if record.term is not None and not 0 < record.term < 1 << 63:
            raise ValueError(f"its term is {record.term!r:.40}")
        return record
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, ProtocolError) as error:
        raise UsageError(
            f"{path} cannot be read ({error!s:.200}). It records whether this standby has taken over; "
            "if it has not, remove the file and run diloco-broker promote against the hub."
        ) from None


def write_standby(folder: Path, record: StandbyRecord) -> None:
    """Write the record and flush it to disk; raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f".{FILE}.{os.getpid()}"
    with open(aside, "w") as file:
        json.dump(asdict(record), file)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(folder / FILE)
    checkpoint.sync_folder(folder)
