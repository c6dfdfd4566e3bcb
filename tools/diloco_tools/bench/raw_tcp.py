"""The limit that all is compared with on the wire: one TCP connection between two Python processes.

1 MiB `sendall` on one side, `recv_into` on the other, with buffers that are made once. Nothing is
done with the bytes. A program in Python that has to hand them over cannot be faster.
"""

from __future__ import annotations

from dataclasses import dataclass

from diloco_tools.bench.role_process import RoleProcess
from diloco_tools.bench.roles.raw import CALL_BYTES


@dataclass(frozen=True)
class RawSample:
    """One measurement: speed in GB/s, CPU seconds per GB of either end."""

    speed: float
    send_cpu: float
    receive_cpu: float


@dataclass(frozen=True)
class Ends:
    """Two processes with a connection from one to the other."""

    sender: RoleProcess
    receiver: RoleProcess

    def connect(self, through: int | None = None) -> None:
        """Connect them, where `through` is given by way of that port, which leads to the receiver's."""
        port = self.receiver.ask("port")["port"] if through is None else through
        self.receiver.tell("accept")
        self.sender.ask("connect", port=port)
        self.receiver.hear()

    def move(self, count: int) -> RawSample:
        """Move `count` MiB."""
        self.receiver.tell("take", count=count)
        self.sender.tell("give", count=count)
        given, taken = self.sender.hear(), self.receiver.hear()
        gigabytes = count * CALL_BYTES / 1e9
        return RawSample(
            gigabytes / (taken["ended"] - given["began"]),
            given["cpu"] / gigabytes,
            taken["cpu"] / gigabytes,
        )


class RawTcp:
    """Measures the limit again whenever it is asked.

    Args:
        amount: bytes of each measurement.
        samples: gets all of them.
    """

    def __init__(self, ends: Ends, amount: int, samples: list[RawSample]) -> None:
        self._ends = ends
        self._count = max(1, amount // CALL_BYTES)
        self._samples = samples
        ends.connect()
        ends.move(self._count)  # the first one lets the kernel's buffers grow

    def measure(self) -> RawSample:
        sample = self._ends.move(self._count)
        self._samples.append(sample)
        return sample
