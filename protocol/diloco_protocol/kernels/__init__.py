"""Compiled kernels for chunks in host memory. torch does the same work until they are loaded.

`start` loads the kernels in a background thread (about 1 s of CPU). `ready` returns them, or None while
they are not loaded; the caller then uses torch. Both paths produce the same bits. Loading never blocks a
caller:

- Compilation takes about 12 s of one core, once per machine and numba version. A low-priority subprocess
  does it and stores the result in numba's cache: `__pycache__`, or the user's cache folder if the
  package is read-only.
- Forking while another thread imports a module leaves the child unable to import it. `os.fork` therefore
  waits until the import of numba is finished, which takes about a second.

`DILOCO_KERNELS=torch` turns them off.
"""

from __future__ import annotations

import atexit
import logging
import os
import subprocess
import sys
import threading

from diloco_protocol.kernels.calls import FORMS, Kernels, Source, Terms

__all__ = ["FORMS", "Kernels", "Source", "Terms", "ready", "start", "wait"]

log = logging.getLogger(__name__)
SWITCH = "DILOCO_KERNELS"
COMPILE = """
import os
if hasattr(os, "nice"):
    os.nice(10)
from diloco_protocol.kernels import compiled
compiled.load()
"""


class _Loading:
    """The background thread that loads the kernels, and its result."""

    def __init__(self) -> None:
        self.kernels: Kernels | None = None
        self.is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self._compiler: subprocess.Popen[bytes] | None = None
        self._importing = threading.Lock()
        self._is_exiting = False

    def start(self) -> None:
        if self._thread is not None or _is_off():
            return
        self._thread = threading.Thread(target=self._run, name="diloco-kernels", daemon=True)
        lock = self._importing
        if hasattr(os, "register_at_fork"):  # not on Windows
            os.register_at_fork(
                before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release
            )
        atexit.register(self._stop)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.kernels = self._loaded()
        except Exception as error:  # noqa: BLE001  whatever is wrong with numba: torch does the work
            log.info("no compiled kernels, torch does the work: %r", error)
        finally:
            self.is_over.set()

    def _loaded(self) -> Kernels | None:
        with self._importing:
            from diloco_protocol.kernels import compiled

            is_cached = compiled.is_cached()
        if not is_cached:
            self._compile()
        with self._importing:
            if self._is_exiting:
                return None
            compiled.load()
            kernels = Kernels(compiled)
            if kernels.agree():
                return kernels
        log.info("no compiled kernels: they round in another way than torch on this machine")
        return None

    def _compile(self) -> None:
        """Fill numba's cache from a subprocess, so that this process is not slowed down."""
        self._compiler = subprocess.Popen(
            [sys.executable, "-c", COMPILE],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        _, said = self._compiler.communicate()
        if self._compiler.returncode:
            last = said.decode(errors="replace").strip().rpartition("\n")[2]
            raise RuntimeError(f"compiling ended with {self._compiler.returncode}: {last}")

    def _stop(self) -> None:
        """Kill the compiler and wait for an import in progress: exiting during one may crash."""
        self._is_exiting = True
        if self._compiler is not None:
            self._compiler.kill()
        if self._importing.acquire(timeout=5):
            self._importing.release()  # exit handlers that run later may fork


_loading = _Loading()


def _is_off() -> bool:
    return os.environ.get(SWITCH) == "torch"


def start() -> None:
    """Start loading the kernels in the background. Later calls do nothing."""
    _loading.start()


def ready() -> Kernels | None:
    """Return the kernels, or None if they are not loaded or are turned off."""
    return None if _is_off() else _loading.kernels


def wait(seconds: float) -> bool:
    """Start loading and wait until it has succeeded or failed; for tests and measurements."""
    start()
    return not _is_off() and _loading.is_over.wait(seconds) and ready() is not None
