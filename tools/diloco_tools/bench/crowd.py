"""Many workers that do nothing but send a heartbeat a second, all in one process."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import zmq

from diloco_tools.bench.figures import Figure, figure
from diloco_tools.bench.stand_in import StandIn, flat_manifest

if TYPE_CHECKING:
    from diloco_tools.bench.actor import Action
    from diloco_tools.bench.stage import Stage

PART = "idle workers"
PARAMETERS = 1000
SOCKETS = 1 << 13
SETTLE_S = 1.5  # heartbeats before the clock starts


class Crowd:
    """The actions of the role "crowd"."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, SOCKETS)
        self._workers: list[StandIn] = []

    @property
    def actions(self) -> Mapping[str, Action]:
        return {"join": self.join, "live": self.live}

    def join(self, address: str, count: int) -> None:
        """Let so many workers join; the first one provides the parameters."""
        for i in range(count):
            worker = StandIn(self._context, address, f"idle-{i}", flat_manifest(PARAMETERS))
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


def measure(stage: Stage, *, workers: int, seconds: float) -> list[Figure]:
    """What heartbeats of workers that train cost the broker, as a share of one core."""
    row = f"{workers} workers, a heartbeat a second"
    # Round one waits for one worker more, so nothing but heartbeats goes on.
    with stage.broker("--workers", str(workers + 1), "--stall-timeout", "0") as broker:
        crowd = stage.actor("crowd")
        crowd.ask("join", address=broker.address, count=workers)
        crowd.tell("live", seconds=SETTLE_S + seconds, interval_s=1.0)
        time.sleep(SETTLE_S)
        shares = []
        for _ in range(3):
            cpu, at = broker.cpu_seconds, time.monotonic()
            time.sleep(seconds / 3)
            shares.append((broker.cpu_seconds - cpu) / (time.monotonic() - at))
        found = crowd.hear()
        note = f"{found['answered']} of {found['sent']} heartbeats answered"
        asked = "idle" if workers == 500 else None
        figures = [figure(PART, row, "of a core", shares, "%", asked, note)]
        growth = broker.beyond_state(0) / 1e6
        figures.append(figure(PART, row, "broker memory", growth, "MB"))
    stage.dismiss("crowd")
    return figures
