"""What a standby remembers of itself in its folder: its name, and whether it has taken over."""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from diloco_broker.storage import checkpoint
from diloco_protocol.errors import UsageError

FILE = "standby.json"


@dataclass(frozen=True)
class StandbyRecord:
    """`name` is what its hub knows it by, `term` that with which it has taken over; None: it has not."""

    name: str
    term: int | None = None


def read_standby(folder: Path) -> StandbyRecord | None:
    """What is remembered there; None where nothing is. Raises UsageError for a file that is damaged."""
    path = folder / FILE
    try:
        plain = json.loads(path.read_text())
        name, term = plain["name"], plain["term"]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unreadable(path, repr(error)) from None
    if not isinstance(name, str) or not (
        term is None or (type(term) is int and 0 < term < 1 << 63)
    ):
        raise _unreadable(path, f"it has {name!r:.40} and {term!r:.40}")
    return StandbyRecord(name, term)


def _unreadable(path: Path, why: str) -> UsageError:
    return UsageError(
        f"{path} cannot be read ({why:.200}), and says whether this standby has the run; if it has not, "
        "remove the file, and say diloco-broker promote to the hub."
    )


def new_standby() -> StandbyRecord:
    """A standby that no hub knows yet."""
    return StandbyRecord(secrets.token_hex(8))


def write_standby(folder: Path, record: StandbyRecord) -> None:
    """Remember it, on the disk when this returns; raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f".{FILE}.{os.getpid()}"
    with open(aside, "w") as file:
        json.dump({"name": record.name, "term": record.term}, file)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(folder / FILE)
    checkpoint.sync_folder(folder)
