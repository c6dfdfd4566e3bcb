"""How much of a core the broker uses, from the CPU seconds that its snapshots count. Pure."""

from collections import deque

from diloco_protocol.feed import Snapshot

SNAPSHOTS = 6  # five seconds of a live feed: one turn of work does not make the figure jump


class CpuUse:
    """CPU seconds over seconds of the broker's uptime, in the last few snapshots."""

    def __init__(self) -> None:
        self._epoch = ""
        self._seen: deque[tuple[float, float]] = deque(maxlen=SNAPSHOTS)

    def update(self, snapshot: Snapshot) -> None:
        """Take the next snapshot; another life of the broker begins anew."""
        if snapshot.epoch != self._epoch:
            self._epoch = snapshot.epoch
            self._seen.clear()
        spent = snapshot.loop.cpu_s
        if spent is not None and (not self._seen or snapshot.uptime_s > self._seen[-1][0]):
            self._seen.append((snapshot.uptime_s, spent))

    @property
    def value(self) -> float | None:
        """1.0 is one core; None while it is not known."""
        if len(self._seen) < 2:
            return None
        (began, before), (ended, after) = self._seen[0], self._seen[-1]
        return max(0.0, after - before) / (ended - began)
