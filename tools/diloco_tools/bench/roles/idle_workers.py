"""The role "idle_workers": many workers that do nothing but send heartbeats, all in one process."""

from __future__ import annotations

import time
from typing import Any

import zmq

from diloco_tools.bench.roles.fake_worker import FakeWorker, flat_manifest

PARAMETERS = 1000
SOCKETS = 1 << 13


class Role:
    """All of them in one thread."""

    def __init__(self, _: object) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, SOCKETS)
        self._workers: list[FakeWorker] = []

    def join(self, address: str, count: int) -> None:
        """Let `count` workers join; the first one provides the parameters."""
        for i in range(count):
            worker = FakeWorker(self._context, address, f"idle-{i}", flat_manifest(PARAMETERS))
            worker.join()
            if not self._workers:
                worker.learn_version()
            self._workers.append(worker)

    def live(self, seconds: float, interval_s: float) -> dict[str, Any]:
        """Each sends a heartbeat every `interval_s`, spread evenly; how many were answered."""
        began = time.monotonic()
        sent = 0
        while (now := time.monotonic()) < began + seconds:
            due = int((now - began) / interval_s * len(self._workers))
            while sent < due:
                self._workers[sent % len(self._workers)].beat()
                sent += 1
            self._workers[sent % len(self._workers)].turn(0)
            time.sleep(interval_s / len(self._workers))
        deadline = time.monotonic() + 5
        while self._answered < sent and time.monotonic() < deadline:
            for worker in self._workers:
                worker.turn(0)
        return {"sent": sent, "answered": self._answered}

    @property
    def _answered(self) -> int:
        return sum(len(worker.answered) for worker in self._workers)
