"""`diloco-broker serve` as a child of the benchmark: its CPU, its memory, its longest turns."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from diloco_protocol.feed import Snapshot
from diloco_tools.bench import machine
from diloco_tools.feed.listener import Listener
from diloco_tools.feed.subscriber import FeedSubscriber
from diloco_tools.processes import Child, Children, wait_for_line

START_WITHIN_S = 60.0
LOOK_EVERY_S = 0.02
STATE_BYTES = 12  # per parameter at the broker: parameters, momentum, accumulator, each in fp32


class BrokerProcess:
    """A broker on ports of its own, and what its feed says.

    Attributes:
        address: of its control socket.
        idle: its memory before it had a model.
        snapshots: all that it has published since the last `forget_turns`.

    Raises:
        ChildFailed: it ended, or did not start in time.
    """

    def __init__(self, child: Child) -> None:
        self._child = child
        self.address = wait_for_line(child, "control", START_WITHIN_S)
        self.snapshots: list[Snapshot] = []
        feed = wait_for_line(child, "feed", START_WITHIN_S)
        self.idle = machine.memory(child.pid)
        self._listener = Listener(
            lambda: FeedSubscriber(feed), self.snapshots.append, lambda _: None
        )
        self._listener.start()

    @property
    def cpu_seconds(self) -> float:
        return machine.cpu_seconds(self._child.pid)

    def beyond_state(self, parameters: int) -> float:
        """Bytes at the peak that are neither its state nor what it had before it had a model."""
        peak = machine.memory(self._child.pid).peak
        return peak - self.idle.resident - STATE_BYTES * parameters

    def forget_turns(self) -> None:
        """Let what the loop did up to now not count."""
        self.wait_for(lambda _: True)
        self.snapshots.clear()

    def longest_turn_ms(self) -> float:
        """Of all turns since `forget_turns`, in thread CPU."""
        self.wait_for(lambda _: True)  # the turns since the last snapshot are in the next
        return max(each.loop.longest_turn_ms or 0.0 for each in self.snapshots)

    def wait_for(self, what: Callable[[Snapshot], bool], within_s: float = 60.0) -> Snapshot:
        """The first snapshot from now on that is so.

        Raises:
            ChildFailed: there is none within `within_s` seconds.
        """
        deadline, seen = time.monotonic() + within_s, len(self.snapshots)
        while time.monotonic() < deadline and self._child.running:
            for snapshot in self.snapshots[seen:]:
                if what(snapshot):
                    return snapshot
            seen = len(self.snapshots)
            time.sleep(LOOK_EVERY_S)
        raise self._child.failure()

    def end(self) -> None:
        self._listener.close()
        self._child.end()


@contextlib.contextmanager
def running_broker(children: Children, options: tuple[str, ...]) -> Iterator[BrokerProcess]:
    """A broker for as long as the context lasts."""
    command = [sys.executable, "-m", "diloco_broker", "serve", *options]
    command += ["--bind", "tcp://127.0.0.1:*", "--feed", "tcp://127.0.0.1:*"]
    if "--save-dir" not in options:
        command.append("--no-save")
    broker = BrokerProcess(children.start(f"broker-{len(children.all) + 1}", command))
    try:
        yield broker
    finally:
        broker.end()
