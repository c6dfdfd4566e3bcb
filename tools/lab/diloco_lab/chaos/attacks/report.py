"""The result of an attack, the bounds that it broke, and the table. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from diloco_lab.driver.tables import Table, table_of

LEAST_PACE = 0.8  # of the calm one just before
MOST_MEMORY_MIB = 64.0
# In addition with a key: an unread encrypted chunk is a copy for each reader.
MORE_WITH_KEYS_MIB = 64.0
# Of all attacks together; glibc also keeps the end of the heap of libzmq's thread, up to 64 MiB.
MOST_KEPT_MIB = 128.0
SLOWEST_ANSWER_MS = 50.0
MOST_WRITTEN_KIB = 64.0  # to the log and the history, in one attack
MIB = 1 << 20


@dataclass(frozen=True)
class Row:
    """One attack."""

    attack: str
    by: str
    attempts: dict[str, int]  # messages, connections, bytes, ended, refused
    through: list[str]
    calm: float  # rounds per second
    beside: float
    rise_mib: float = 0.0
    after_mib: float = 0.0
    kept_mib: float = 0.0  # after it, beyond the broker's memory before the first attack
    answer_ms: float = 0.0
    echo_ms: float = 0.0
    written_kib: float = 0.0
    seconds: float = 0.0
    first: dict[str, Any] | None = None  # the first measurement, if it broke a bound

    @property
    def kept(self) -> float:
        """Part of the calm pace."""
        return self.beside / self.calm if self.calm else 0.0

    def broken(self) -> list[str]:
        """A sentence for each broken bound."""
        more = MORE_WITH_KEYS_MIB if self.by.startswith("key") else 0.0
        late, more_memory = self.answer_ms - self.echo_ms, MOST_MEMORY_MIB + more
        answer = f"{self.answer_ms:.0f} ms (an echo {self.echo_ms:.0f} ms)"
        bounds = {
            f"rounds closed at {self.kept:.2f} of their pace": self.kept < LEAST_PACE,
            f"the broker's memory rose by {self.rise_mib:.0f} MiB": self.rise_mib > more_memory,
            f"{self.kept_mib:.0f} MiB have stayed since the first": self.kept_mib > MOST_KEPT_MIB,
            f"a heartbeat took {answer}": late > SLOWEST_ANSWER_MS,
            f"{self.written_kib:.0f} KiB went to the log and the history": (
                self.written_kib > MOST_WRITTEN_KIB
            ),
        }
        found = [f"GOT THROUGH: {each}" for each in self.through]
        found += [sentence for sentence, is_broken in bounds.items() if is_broken]
        return [f"{self.attack}, {self.by}: {each}" for each in found]

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"kept": self.kept, "broken": self.broken()}

    def __str__(self) -> str:
        return (
            f"{self.attack}, {self.by}: {self.kept:.2f} of {self.calm:.1f} rounds/s, RSS "
            f"{self.rise_mib:+.0f} MiB, answer {self.answer_ms:.0f} ms{'; BROKEN' * bool(self.broken())}"
        )


COLUMNS: Mapping[str, Callable[[Row], str]] = {
    "attack": lambda of: of.attack + " *" * (of.first is not None),
    "by": lambda of: of.by,
    "messages\nconns": lambda of: "{messages:,}\n{connections:,}".format(**of.attempts),
    "MiB sent\nended": lambda of: f"{of.attempts['bytes'] / MIB:.1f}\n{of.attempts['ended']:,}",
    "through": lambda of: str(len(of.through) or "nothing"),
    "pace kept\nof rounds/s": lambda of: f"{of.kept:.2f}\n{of.calm:.1f}",
    "RSS MiB\npeak, after": lambda of: f"{of.rise_mib:+.0f}, {of.after_mib:+.0f}",
    "answer ms\n(echo)": lambda of: f"{of.answer_ms:.0f} ({of.echo_ms:.0f})",
    "KiB\nwritten": lambda of: f"{of.written_kib:.0f}",
}


def table(rows: Sequence[Row]) -> Table:
    return table_of("attacks", "attacks, and what they cost", COLUMNS, rows, labels=2)
