"""The folder of checkpoints in a simulated run.

They are the product's own (`writer.checkpoint_of`), with the contents of chunks in the place of tensors.
The folder outlives brokers. A checkpoint is there whole or not at all; which one is the newest, and how
many are kept, is as `storage.checkpoint` has it.
"""

from diloco_broker.storage.checkpoint_format import Checkpoint


class Disk:
    def __init__(self, keep: int) -> None:
        # By incarnation of the broker and number of the next round.
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
    def next_incarnation(self) -> int:
        return 1 + max((incarnation for incarnation, _ in self.checkpoints), default=0)

    def write(self, checkpoint: Checkpoint) -> str | None:
        """Keep a checkpoint; returns what is wrong if that cannot be."""
        if self.is_full:
            self.failures += 1
            return "No space left on device"
        self.writes += 1
        self.checkpoints[checkpoint.incarnation, checkpoint.number] = checkpoint
        for old in sorted(self.checkpoints)[: -self._keep]:
            del self.checkpoints[old]
        return None
