"""The folder of checkpoints in a simulated run, and the thread that writes into it.

They are the product's own (`writer.checkpoint_of`), with the contents of chunks in the place of tensors.
The folder outlives brokers. A checkpoint is there whole or not at all; which one is the newest, and how
many are kept, is as `storage.checkpoint` has it.
"""

from __future__ import annotations

from collections.abc import Callable

from diloco_broker.storage.checkpoint_format import Checkpoint
from simulation.network import World

# Longest time between the thread that writes and the loop.
BETWEEN_THREADS_S = 0.01


class Disk:
    """See the head of this module."""

    def __init__(self, keep: int) -> None:
        # By life of the broker and number of the next round.
        self.checkpoints: dict[tuple[int, int], Checkpoint] = {}
        self.is_full = False
        self.writes = 0
        self.failures = 0
        self._keep = keep

    @property
    def newest(self) -> Checkpoint | None:
        """What the next broker goes on from."""
        return self.checkpoints[max(self.checkpoints)] if self.checkpoints else None

    @property
    def next_life(self) -> int:
        """The number of the next life of the broker."""
        return 1 + max((life for life, _ in self.checkpoints), default=0)

    def write(self, checkpoint: Checkpoint) -> str | None:
        """Keep a checkpoint; returns what is wrong if that cannot be."""
        if self.is_full:
            self.failures += 1
            return "No space left on device"
        self.writes += 1
        self.checkpoints[checkpoint.life, checkpoint.number] = checkpoint
        for old in sorted(self.checkpoints)[: -self._keep]:
            del self.checkpoints[old]
        return None


class Saver:
    """As `CheckpointWriter`: one at a time, and of those that wait only the newest is written.

    `save_s` is the longest time it takes; `report` is told the number and what is wrong, if anything.
    """

    def __init__(
        self, world: World, disk: Disk, save_s: float, report: Callable[[int, str | None], None]
    ) -> None:
        self._world = world
        self._disk = disk
        self._save_s = save_s
        self._report = report
        self._next: Checkpoint | None = None
        self._is_busy = False
        self._is_dead = False

    @property
    def is_idle(self) -> bool:
        """Everything is written and reported."""
        return self._next is None and not self._is_busy

    def save(self, checkpoint: Checkpoint) -> None:
        """Write this checkpoint as soon as the one at hand is done."""
        self._next = checkpoint
        self._go_on()

    def dies(self) -> None:
        """Killed: what is half written is nothing."""
        self._is_dead = True

    def _go_on(self) -> None:
        if self._next is None or self._is_busy:
            return
        checkpoint, self._next = self._next, None
        self._is_busy = True
        self._world.after(
            self._world.dice.uniform(0, self._save_s), lambda: self._write(checkpoint)
        )

    def _write(self, checkpoint: Checkpoint) -> None:
        if not self._is_dead:
            error = self._disk.write(checkpoint)
            between = self._world.dice.uniform(0, BETWEEN_THREADS_S)
            self._world.after(between, lambda: self._is_done(checkpoint.number, error))

    def _is_done(self, number: int, error: str | None) -> None:
        """The loop hears of it; killed in between, it never does though it is there."""
        if not self._is_dead:
            self._is_busy = False
            self._report(number, error)
            self._go_on()
