"""The web page beside the broker: a process of its own, which lives no longer than the broker does.

It reads the feed like any display, so nothing it does can slow the broker down. Its standard input
is a pipe without a writer: when the broker ends, however it ends, the pipe closes and so does it.
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
    """The file of the page's key in a broker's folder of keys: a monitor's, which cannot steer.

    Raises:
        UsageError: there is none, and none can be made.
    """
    try:
        return KeyFolder(folder).for_dashboard()
    except OSError as error:
        raise UsageError(
            f"--dashboard wants a key of its own, and {error.filename} cannot be written: "
            f"{error.strerror}. Let this user write there, or start the page by itself: "
            "diloco-dashboard --keys FILE"
        ) from None


class Dashboard:
    """Starts `diloco-dashboard`, on a free port where it is 0, and logs the address to open.

    `key` is the file of its key, where the broker asks for one.
    """

    def __init__(self, feed: str, control: str, port: int, key: Path | None = None) -> None:
        words = ["--feed", feed, "--control", control, "--port", str(port), "--lifeline"]
        # A key that the user who starts the broker has for another one is not for this page.
        environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
        if key is not None:
            words += ["--keys", str(key)]
            logger.info(
                "The dashboard only shows, with a monitor's key of its own (%s). One that steers: "
                "diloco-dashboard --feed %s --port 0 --keys FILE, of an operator in %s",
                key,
                feed,
                shlex.quote(str(key.parent)),
            )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "diloco_tools.monitor.web", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
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
