"""Runs the dashboard of the broker in a child process that exits with the broker.

It reads the feed like other displays, so it cannot slow the broker down. Its standard input is a pipe
without data: when the broker exits, even if it is killed, the pipe closes and the dashboard exits.
"""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
import sys
import threading
from pathlib import Path

from diloco_broker.storage.key_folder import KeyFolder
from diloco_protocol.clients.keys import VARIABLE
from diloco_protocol.errors import UsageError

logger = logging.getLogger("diloco.broker")

ENDS_WITHIN_S = 3.0


def key_of_page(folder: Path) -> Path:
    """The key file of the dashboard in a broker's key folder: a monitor's key, which is read-only.

    Raises:
        UsageError: it does not exist, and cannot be created.
    """
    try:
        return KeyFolder(folder).for_dashboard()
    except OSError as error:
        raise UsageError(
            f"--dashboard needs its own key, but {error.filename} cannot be written: {error.strerror}. "
            "Make it writable for this user, or start the page separately: diloco-dashboard --keys FILE"
        ) from None


class Dashboard:
    """Starts `diloco-dashboard`, and logs the address to open. Port 0 picks a free one.

    `key` is its key file, if the broker requires keys.
    """

    def __init__(self, feed: str, control: str, port: int, key: Path | None = None) -> None:
        words = ["--feed", feed, "--control", control, "--port", str(port), "--lifeline"]
        # The variable may name a key for another broker.
        environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
        if key is not None:
            words += ["--keys", str(key)]
            logger.info(
                "The dashboard is read-only: it uses a monitor's key (%s). To operate the run, start "
                "diloco-dashboard --feed %s --port 0 --keys FILE with an operator's key from %s",
                key,
                feed,
                shlex.quote(str(key.parent)),
            )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "diloco_tools.monitor.web.cli", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C goes to the broker, which stops the dashboard
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
        if not self._is_ending:  # it has logged the reason itself
            logger.error("The dashboard exited with code %d; the run continues without it.", code)

    def close(self) -> None:
        """Stop the dashboard, by killing it if it does not exit in time."""
        self._is_ending = True
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(ENDS_WITHIN_S)
