"""Which of a broker's addresses is tried next, where a worker was given several. Pure.

A hub and its standby have an address each, and one of them lets workers in. A worker stays where it is
welcomed. When that is lost it asks there first, since a connection may break by itself; then the others
in order, from the first that it was given. When all have been asked it pauses, and begins again with
the first.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from diloco_protocol import Code

# What a broker answers that lets nobody in, where another may.
ELSEWHERE = (Code.STANDBY, Code.STOPPING)
# Seconds in which an address has to answer, where there is another one to try: a TCP connection and a
# handshake with keys take five round trips.
CONNECT_PATIENCE_S = 3.0
# The longest pause after all have been asked. A standby that takes over is found within it.
LONGEST_PAUSE_S = 0.5


@dataclass
class Places:
    """See the head of this module. The addresses are the shell's; here they are numbers from 0.

    Attributes:
        count: how many there are.
        current: the one that is tried, or where the broker is.
    """

    count: int = 1
    current: int = 0
    _asked: set[int] = field(default_factory=set)  # since the last pause, without success
    _locked: set[int] = field(default_factory=set)  # where the key was good for nothing

    @property
    def are_several(self) -> bool:
        return self.count > 1

    def welcomed(self) -> None:
        """The one at hand is right: when it is lost, all are asked again."""
        self._asked.clear()
        self._locked.clear()

    def lock(self) -> bool:
        """The key is good for nothing at the one at hand. Returns whether that is so everywhere."""
        self._locked.add(self.current)
        return len(self._locked) == self.count

    def turn(self) -> bool:
        """The one at hand is of no use now: turn to the next. Returns whether all have been asked."""
        self._asked.add(self.current)
        left = [each for each in range(self.count) if each not in self._asked]
        self.current = left[0] if left else 0
        if not left:
            self._asked.clear()
        return not left
