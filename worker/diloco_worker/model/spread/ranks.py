"""The processes of one worker, and their communication.

It uses a separate gloo group, on the CPU, beside the collectives of training. Every method is a
collective: all processes call the same ones in the same order. Failures raise `GroupBroken` in the
remaining processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import msgpack
import torch
import torch.distributed as dist
from torch import Tensor

from diloco_protocol import UsageError

# Bytes of a value that fits into one message.
ROOM = 1 << 10
# Calls of the script that all processes begin together.
STEP, FORCE, LOAD, VIEW, SAVE = DEEDS = (
    "optimizer.step()",
    "force_sync()",
    "load_global()",
    "global_parameters()",
    "state_dict()",
)
WORLD = "world"

T = TypeVar("T")


class GroupBroken(RuntimeError):
    """A process of this worker is gone or has failed, so the others cannot go on."""


class Ranks:
    """One process of the group.

    Args:
        group: a `torch.distributed.ProcessGroup` of the worker's processes, with any backend.

    Raises:
        UsageError: this process is not in the group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        members = dist.get_process_group_ranks(group)
        if dist.get_rank() not in members:
            raise UsageError(
                "process_group is a group that this process is not in; give each process its own."
            )
        # Made by its members alone, without other workers of the same launch.
        self._group: Any = dist.new_group(
            members, backend="gloo", use_local_synchronization=True, group_desc="diloco"
        )
        self.rank: int = dist.get_rank(self._group)
        self.count: int = len(members)
        # A length, and the beginning of a value.
        self._head = torch.zeros(1 + ROOM // 8, dtype=torch.int64)
        # A context around each wait for the others.
        self.waits_for: Callable[[str], AbstractContextManager[object]] = nullcontext

    @property
    def leads(self) -> bool:
        """Whether this process speaks for the worker."""
        return self.rank == 0

    def broadcast(self, value: Any = None) -> Any:
        """The leader's plain value; the others pass none."""
        # One message at each step, where `broadcast_object_list` takes two.
        text = msgpack.packb(value) if self.leads else b""
        head, body = self._head, self._head[1:].view(torch.uint8)
        if self.leads:
            head[0] = len(text)
            body[: len(text)] = _bytes_of(text[:ROOM])
        self._do(lambda: dist.broadcast(head, group=self._group, group_src=0))
        length = int(head[0])
        found = body[:length]
        if length > ROOM:
            empty = torch.empty(length - ROOM, dtype=torch.uint8)
            rest = _bytes_of(text[ROOM:]) if self.leads else empty
            self._do(lambda: dist.broadcast(rest, group=self._group, group_src=0))
            found = torch.cat([found, rest])
        return _read(found.numpy().tobytes())

    def gather(self, value: Any) -> list[Any]:
        """The plain value of each process, in order, in all of them."""
        texts: list[Any] = [None] * self.count
        packed = msgpack.packb(value)
        self._do(lambda: dist.all_gather_object(texts, packed, group=self._group))
        return [_read(each) for each in texts]

    def total(self, numbers: Sequence[float]) -> list[float]:
        """The sum over all processes, number by number."""
        sums = torch.tensor(numbers, dtype=torch.float64)
        self._do(lambda: dist.all_reduce(sums, group=self._group))
        return [float(each) for each in sums]

    def meet(self, deed: str, number: float = 0.0) -> float:
        """Begin one of `DEEDS` together. Returns the sum of the numbers.

        Raises:
            GroupBroken: another process begins something else; in all processes.
        """
        code = 1 + DEEDS.index(deed)
        with self.waits_for(deed) if deed != STEP else nullcontext():
            total, codes, squares = self.total([number, code, code * code])
        if self.count * squares != codes * codes:
            told = self.gather(deed)
            other = next(rank for rank, each in enumerate(told) if each != told[0])
            raise GroupBroken(
                f"Process 0 of this worker is at {told[0]}, and process {other} at {told[other]}: they "
                "cannot go on together. Call it in all processes, at the same step, not only where "
                "rank == 0."
            )
        return total

    def exchange(
        self, sent: Tensor, sizes: Sequence[int], room: Tensor, wanted: Sequence[int]
    ) -> None:
        """Send bytes to each process, and receive bytes from each.

        Args:
            sent: uint8, the messages to each process in order, `sizes` bytes each.
            room: uint8, for `wanted` bytes from each process, in the same way.
        """
        assert sent.numel() == sum(sizes) and room.numel() == sum(wanted)
        self._do(
            lambda: dist.all_to_all_single(room, sent, list(wanted), list(sizes), group=self._group)
        )

    def raise_together(self, error: Exception | None) -> None:
        """If any process failed, all raise: its own error, or GroupBroken that quotes it."""
        said = self.gather(None if error is None else f"{type(error).__name__}: {error}"[:2000])
        if error is not None:
            raise error
        for rank, text in enumerate(said):
            if text is not None:
                raise GroupBroken(f"Process {rank} of this worker has failed: {text}")

    def agreed(self, action: Callable[[], T]) -> T:
        """Call something that may fail in one process and not in another; then all raise."""
        error, result = None, None
        try:
            result = action()
        except Exception as failure:  # noqa: BLE001  it is raised below
            error = failure
        self.raise_together(error)
        return result  # type: ignore[return-value]

    def _do(self, collective: Callable[[], object]) -> None:
        try:
            collective()
        except RuntimeError as error:
            raise GroupBroken(
                "Another process of this worker is gone or stuck, so this one cannot go on: "
                f"{str(error).splitlines()[0]:.300}. Let the launcher start all of them again "
                "(torchrun --max-restarts)."
            ) from error


def group_of(given: object) -> dist.ProcessGroup:
    """The group of `process_group=`: "world", a ProcessGroup, or a DeviceMesh of any dimensions.

    Raises:
        UsageError: it is none of these, or torch.distributed is not initialised.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise UsageError(
            "process_group is set, but torch.distributed is not initialised; call "
            "torch.distributed.init_process_group() first, and start the script with torchrun."
        )
    if given == WORLD:
        world = dist.group.WORLD
        assert world is not None
        return world
    if isinstance(given, dist.ProcessGroup):
        return given
    flattened = getattr(given, "_flatten", None)  # a DeviceMesh, which is costly to import
    if flattened is not None and hasattr(given, "get_group"):
        return given.get_group() if given.ndim == 1 else flattened().get_group()  # type: ignore
    raise UsageError(
        f"process_group is a {type(given).__name__}; give 'world', a torch.distributed.ProcessGroup or "
        "a DeviceMesh."
    )


def _bytes_of(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _read(text: bytes) -> Any:
    return msgpack.unpackb(text, use_list=False, strict_map_key=False)
