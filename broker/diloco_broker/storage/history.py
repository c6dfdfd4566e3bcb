"""Writes the history of a run as lines of JSON: rounds, events, operators' actions.

`history.jsonl` has one line for each closed round and each event. Its size is bounded: once it is large
it is renamed to `history.1.jsonl`, replacing an earlier one. `control.jsonl` has operators' actions; it
stays short and is only appended to. A background thread writes both, because a slow disk must not delay
a round. Lines that do not fit on a full disk are lost and counted.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diloco_broker.storage.background import Background
from diloco_protocol.feed import json_safe

HISTORY = "history.jsonl"
FORMER = "history.1.jsonl"
ACTIONS = "control.jsonl"
LONGEST_FILE = 16 << 20  # bytes
LINES_WAITING = 10_000
# Seconds to wait for the last lines when the broker stops.
FINISH_WITHIN_S = 5.0


class HistoryWriter:
    """Appends lines to the files in a folder, in a background thread.

    logging's QueueListener and RotatingFileHandler do not suffice: a disk that hangs would block the
    exit of the process (`logging.shutdown` waits for each handler's lock), and a line that did not fit
    on a full disk stays in the handler's buffer, in front of the next one.

    The folder is created with the first line. Each line has `epoch`, this incarnation of the broker.
    """

    def __init__(self, folder: Path, epoch: str) -> None:
        # error of the last write; None if it succeeded
        self.error: str | None = None
        self.lost = 0  # lines that could not be written
        self._folder, self._epoch = folder, epoch
        self._start: dict[str, Any] | None = None
        self._lines = Background[tuple[str, dict[str, Any]], None]("diloco-history", self._append)

    def add(self, line: Mapping[str, Any]) -> None:
        """Append a line to the history. Returns at once."""
        self._put(HISTORY, line)

    def act(self, line: Mapping[str, Any]) -> None:
        """Append a line to the log of operators' actions. Returns at once."""
        self._put(ACTIONS, line)

    def close(self) -> None:
        """Write pending lines, for at most `FINISH_WITHIN_S`."""
        self._lines.finish(FINISH_WITHIN_S)
        self._lines.close()

    def _put(self, name: str, line: Mapping[str, Any]) -> None:
        stamped = {"at": round(time.time(), 3), "epoch": self._epoch, **line}
        if len(self._lines) >= LINES_WAITING:
            self.lost += 1  # the disk has hung for a long time
        else:
            self._lines.add((name, stamped))

    def _append(self, named: tuple[str, dict[str, Any]]) -> None:
        name, line = named
        self._start = line if line.get("kind") == "start" else self._start
        try:
            text = _text(line)
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / name
            with open(path, "ab+") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(end - 1, 0))
                if file.read(1) not in (b"", b"\n"):  # truncated by a crash or a full disk
                    file.write(b"\n")
                file.write(text.encode())
                is_long = file.tell() > LONGEST_FILE
            if is_long and name == HISTORY:
                path.replace(self._folder / FORMER)
                if self._start is not None:  # each file begins with the description of its run
                    path.write_text(_text(self._start))
            self.error = None
        except Exception as error:  # noqa: BLE001 - usually a full disk; the thread must survive
            self.lost += 1
            self.error = getattr(error, "strerror", None) or str(error) or repr(error)


def _text(line: dict[str, Any]) -> str:
    return json.dumps(json_safe(line), allow_nan=False) + "\n"
