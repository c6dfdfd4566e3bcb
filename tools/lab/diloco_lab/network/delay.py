"""A line with a delay, for kernels without `netem`: a process between its two ends.

    python -m diloco_lab.network.delay END END SECONDS

Makes two interfaces (tap) in the namespace where it runs, and carries each frame that goes into one of
them out of the other, SECONDS later. A token bucket in front of each end limits the rate, and so bounds
the frames in flight. It ends when an interface is gone, or its parent process.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from typing import NamedTuple

TUN = "/dev/net/tun"
# From linux/if_tun.h: the request to make an interface; frames of Ethernet, with nothing before them.
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
LARGEST = 1 << 16  # bytes of a frame
LOOK_S = 1.0  # between two checks whether the parent process is alive


class Frame(NamedTuple):
    """A frame in flight."""

    due: float
    to: int
    content: bytes


def end_of_a_line(name: str) -> int:
    """The file of a new interface of this name; raises OSError if it cannot be made."""
    file = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return file


def carry(ends: tuple[int, int], delay: float) -> None:
    """Carry frames until an end is gone."""
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    under_way: deque[Frame] = deque()  # in the order of `due`, since all have the same delay
    poll, parent = select.poll(), os.getppid()
    for each in ends:
        poll.register(each, select.POLLIN)
    try:
        while os.getppid() == parent:
            wait = under_way[0].due - time.monotonic() if under_way else LOOK_S
            for end, _ in poll.poll(max(0.0, 1000 * wait)):
                _take(end, other[end], delay, under_way)
            now = time.monotonic()
            while under_way and under_way[0].due <= now:
                _give(under_way.popleft())
    except OSError:
        return  # the interface is gone, and with it the line


def _take(end: int, to: int, delay: float, under_way: deque[Frame]) -> None:
    due = time.monotonic() + delay
    try:
        while True:
            under_way.append(Frame(due, to, os.read(end, LARGEST)))
    except BlockingIOError:
        return


def _give(frame: Frame) -> None:
    try:
        os.write(frame.to, frame.content)
    except BlockingIOError:
        return  # the other end is full: the frame is dropped
    except OSError as error:
        if error.errno != 5:  # EIO: the interface is down, maybe for a while
            raise


if __name__ == "__main__":
    first, second, seconds = sys.argv[1:]
    both = end_of_a_line(first), end_of_a_line(second)
    print("ready yes", flush=True)
    carry(both, float(seconds))
