"""Records of a run: log, feed, history, audit. A failure in one of them does not stop the run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diloco_broker.core.effects import Log, Record, RecordAction, RecordVersion, RoundReport
from diloco_broker.core.operations import status
from diloco_broker.core.state import RunState
from diloco_broker.storage.audit_log import AuditLog
from diloco_broker.storage.history import HistoryWriter
from diloco_protocol.feed import TOPIC

logger = logging.getLogger("diloco.broker")

# Seconds between log lines of one kind of failure, which may repeat with each snapshot.
SAID_AGAIN_AFTER_S = 60.0


class Failures:
    """Catches failures of log, feed, history and audit; logs each kind at most once a minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said_at: dict[str, float] = {}

    @contextmanager
    def caught(self, what: str) -> Iterator[None]:
        """Catch and log any exception raised in this block; `what` names its work."""
        try:
            yield
        except Exception:
            now = self._clock()
            if now - self._said_at.get(what, -SAID_AGAIN_AFTER_S) >= SAID_AGAIN_AFTER_S:
                self._said_at[what] = now
                logger.exception("The %s failed; training continues without it.", what)


class Onlookers:
    """Writes the log, feed, history and audit of a run. It only reads the core's state.

    `figures` returns the current measurements of the loop; `publish` sends a message to the feed's
    subscribers. Raises UsageError if the audit log cannot be written.
    """

    def __init__(
        self,
        state: RunState,
        clock: Callable[[], float],
        figures: Callable[[], status.LoopFigures],
        publish: Callable[[bytes], None],
    ) -> None:
        self._state, self._clock, self._figures = state, clock, figures
        self._send = publish
        self.failures = Failures()
        self._events = status.EventLog()
        self.sequence = 0  # snapshots published
        config, epoch = state.config, state.epoch
        self._audit = AuditLog(Path(config.audit), epoch) if config.audit else None
        self._history = HistoryWriter(Path(config.save_dir), epoch) if config.save_dir else None
        self._history_error: str | None = None
        self._start_line: dict[str, Any] | None = None

    def write(self, record: Record) -> None:
        """Write a record of the core."""
        match record:
            case Log():
                self._tell(record)
            case RecordAction(by=by, text=text):
                self._tell(Log("warning", f"{by}: {text}."))
                with self.failures.caught("log of actions"):
                    if self._history is not None:
                        self._history.act(status.action_line(self._state, record))
            case RoundReport():
                with self.failures.caught("history of the round"):
                    if self._history is not None:
                        self._history.add(status.round_line(self._state, record, self._figures()))
            case RecordVersion():
                with self.failures.caught("audit"):
                    self._write_audit(record)

    def snapshot(self) -> tuple[dict[str, Any], str]:
        """The current snapshot of the feed, and its JSON."""
        return status.snapshot_and_line(
            self._state, self._events, self._figures(), self.sequence, self._clock()
        )

    def publish(self) -> None:
        """Send a snapshot to the subscribers."""
        self.sequence += 1
        with self.failures.caught("feed"):
            snapshot, line = self.snapshot()
            self._send(TOPIC + line.encode())
            self._update_history(snapshot)

    def close(self, last_words: str, *, run_is_over: bool) -> None:
        """Write the last line of the history, and close the files."""
        if self._audit is not None:
            self._audit.close()
        if self._history is not None:
            self._history.add({"kind": "stop", "text": last_words, "run_is_over": run_is_over})
            self._history.close()

    def _tell(self, log: Log) -> None:
        logger.log(logging.getLevelName(log.level.upper()), log.text)
        if log.level == "debug" or not log.is_listed:
            return
        with self.failures.caught("history of an event"):
            self._events.add(log, self._clock())
            if self._history is not None:
                self._history.add({"kind": "event", "level": log.level, "text": log.text})

    def _write_audit(self, audit: RecordVersion) -> None:
        if self._audit is None:
            return
        try:
            self._audit.add(audit)
        except OSError as error:
            path = self._state.config.audit
            self._tell(Log("error", f"Cannot write the audit log {path}: {error.strerror}."))

    def _update_history(self, snapshot: dict[str, Any]) -> None:
        """Write a start line to the history if the run changed; log when writing fails or recovers."""
        if self._history is None:
            return
        line = status.start_line(snapshot)
        reducer = {**line["settings"]["reducer"], "submissions": 0, "waiting": 0}
        changing = {**line, "settings": {**line["settings"], "reducer": reducer}}
        if changing != self._start_line:
            self._start_line = changing
            self._history.add(line)
        error = self._history.error
        if error != self._history_error:
            self._history_error = error
            folder = self._state.config.save_dir
            text = (
                f"Cannot write the history in {folder}: {error}. Training continues without it."
                if error
                else f"Writing the history in {folder} again; {self._history.lost} lines are lost."
            )
            self._tell(Log("error" if error else "info", text))
