"""Compiled kernels for work on chunks in the host's memory; torch does the same until they are there.

`start` has a background thread import numba and load the kernels, some 1 s of CPU; `ready` returns them
once they are loaded, and until then, and for ever where they cannot be, None: then the caller does the
work with torch. Both make the same bits, so it shows nowhere which of them did a chunk. Nobody waits:

- Compiling takes some 12 s of a core, once on a machine and for each version of numba. A process of its
  own does it, at low priority, and leaves the result in numba's cache (`__pycache__`, or the user's
  cache folder where the package cannot be written to).
- A process must not be forked while a thread of it imports: the child could never import the same. So
  `os.fork` waits while numba is imported here, for a second at most.

`DILOCO_KERNELS=torch` turns them off.
"""

from __future__ import annotations

import atexit
import gc
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
    """What the background thread has come to."""

    def __init__(self) -> None:
        self.kernels: Kernels | None = None
        self.is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self._compiler: subprocess.Popen[bytes] | None = None
        self._importing = threading.Lock()

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
            compiled.load()
            kernels = Kernels(compiled)
            # Else each full collection would go through all that numba has made, in whatever thread
            # comes to it: 10 ms of a turn of the broker's loop.
            gc.freeze()
            if kernels.agree():
                return kernels
        log.info("no compiled kernels: they round in another way than torch on this machine")
        return None

    def _compile(self) -> None:
        """Have another process fill numba's cache: this one goes on undisturbed."""
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
        """At the end of this process: neither leave a process behind nor be ended amid an import."""
        if self._compiler is not None:
            self._compiler.kill()
        self._importing.acquire(timeout=5)


_loading = _Loading()


def _is_off() -> bool:
    return os.environ.get(SWITCH) == "torch"


def start() -> None:
    """Begin to load them, in the background; the first call of a process counts."""
    _loading.start()


def ready() -> Kernels | None:
    """The kernels, if they are loaded and not turned off."""
    return None if _is_off() else _loading.kernels


def wait(seconds: float) -> bool:
    """For tests and measurements: begin, and wait until they are `ready`, or will not be."""
    start()
    return not _is_off() and _loading.is_over.wait(seconds) and ready() is not None
