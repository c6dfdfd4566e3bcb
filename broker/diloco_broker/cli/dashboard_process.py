"""The web page beside the broker: a process of its own, which lives no longer than the broker does.

It reads the feed like everybody else, so nothing it does can slow the broker down. Its standard input
is a pipe that nobody writes to: when the broker ends, however it ends, the pipe closes and so does it.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading

logger = logging.getLogger("diloco.broker")

ENDS_WITHIN_S = 3.0


class Dashboard:
    """Starts `diloco-dashboard`, on a free port where it is 0, and logs the address to open."""

    def __init__(self, feed: str, control: str, port: int) -> None:
        words = ["--feed", feed, "--control", control, "--port", str(port), "--lifeline"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "diloco_tools.dashboard", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C in the terminal is for the broker, which ends it
        )
        self._is_ending = False
        self._reader = threading.Thread(target=self._read, name="diloco-dashboard", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            name, _, address = line.strip().partition(" ")
            if name == "dashboard":
                logger.info("Dashboard: %s", address)
        code = self._process.wait()
        if not self._is_ending:  # why, it has said itself
            logger.error("The dashboard ended with code %d; the run goes on without it.", code)

    def close(self) -> None:
        """End it, within a bounded time."""
        self._is_ending = True
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(ENDS_WITHIN_S)
