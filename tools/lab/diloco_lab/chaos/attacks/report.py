"""What an attack came to, which bounds it broke, and the table. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table
from rich.text import Text

LEAST_PACE = 0.8  # of the calm one just before
MOST_MEMORY_MIB = 64.0
# By who has a key, besides: encrypted, a chunk that is not read is a copy for each reader.
MORE_WITH_KEYS_MIB = 64.0
# Of all attacks together: besides, glibc keeps the end of the heap of libzmq's thread, up to 64 MiB.
MOST_KEPT_MIB = 128.0
SLOWEST_ANSWER_MS = 50.0
MOST_WRITTEN_KIB = 64.0  # to the log and the history, in one attack
MIB = 1 << 20

NOTES = (
    "Pace: rounds per second beside the attack / without, just before it. All of it shares the "
    "processors of this machine. Workers rest behind each step, as if they computed elsewhere, so"
    " that the attacker finds a processor; it has a low priority (nice 5). The calm pace is"
    " measured with nothing beside it: what the attacker takes from the others counts against the"
    " broker.",
    "Answer: the longest wait of a member's heartbeat (of a status request where nobody trains), "
    "every 20 ms. In brackets that of a byte which a process that does nothing else sends back, "
    "asked at the same time: so long this machine lets anybody wait, and what goes beyond it is "
    "the broker's. RSS: at the peak, and a moment after the attack. Written: to log and history, "
    "beyond what the rounds closed meanwhile write.",
    "A row with a broken bound is measured once more, and has a star: pace and answer are the second "
    "ones, memory and what was written the larger ones, and the JSON has both."
    f" Memory may rise by {MOST_MEMORY_MIB:g} MiB, by who has a key"
    f" {MOST_MEMORY_MIB + MORE_WITH_KEYS_MIB:g}; of all together {MOST_KEPT_MIB:g} may stay.",
)


@dataclass(frozen=True)
class Row:
    """One attack. A pace that is None was not measured: nobody trained there."""

    attack: str
    by: str
    attempts: dict[str, int]  # messages, connections, bytes, ended, refused
    through: list[str]
    calm: float | None = None  # rounds per second
    beside: float | None = None
    rise_mib: float = 0.0
    after_mib: float = 0.0
    kept_mib: float = 0.0  # after it, beyond what the broker had before the first attack
    answer_ms: float | None = None  # None: nobody was asked
    echo_ms: float = 0.0
    written_kib: float = 0.0
    seconds: float = 0.0
    attacker_cpu: float = 0.0
    again: bool = False  # it is the second measurement
    first: dict[str, Any] | None = field(default=None)  # the first one, whose bounds were broken

    @property
    def kept(self) -> float | None:
        """Part of the calm pace."""
        if self.calm is None or self.beside is None:
            return None
        return self.beside / self.calm if self.calm else 0.0

    def broken(self) -> list[str]:
        """A sentence for each bound that does not hold."""
        who = f"{self.attack}, {self.by}"
        found = [f"{who}: GOT THROUGH: {each}" for each in self.through]
        if self.kept is not None and self.kept < LEAST_PACE:
            found.append(f"{who}: rounds closed at {self.kept:.2f} of their pace")
        more = MORE_WITH_KEYS_MIB if self.by.startswith("key") else 0.0
        if self.rise_mib > MOST_MEMORY_MIB + more:
            found.append(f"{who}: the broker's memory rose by {self.rise_mib:.0f} MiB")
        if self.kept_mib > MOST_KEPT_MIB:
            found.append(f"{who}: {self.kept_mib:.0f} MiB have stayed since the first attack")
        if self.answer_ms is not None and self.answer_ms - self.echo_ms > SLOWEST_ANSWER_MS:
            found.append(
                f"{who}: a heartbeat took {self.answer_ms:.0f} ms (an echo {self.echo_ms:.0f} ms)"
            )
        if self.written_kib > MOST_WRITTEN_KIB:
            found.append(f"{who}: {self.written_kib:.0f} KiB went to the log and the history")
        return found

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"kept": self.kept, "broken": self.broken()}


def table(rows: Sequence[Row]) -> Table:
    """All rows."""
    shown = Table(title="attacks, and what they cost", title_justify="left")
    shown.add_column("attack")
    shown.add_column("by", no_wrap=True)
    for name in (
        "messages\nconnections",
        "MiB sent\nended",
        "through",
        "pace kept\nof rounds/s",
        "RSS MiB\npeak, after",
        "answer ms\n(echo)",
        "KiB\nwritten",
        "its CPU\nof s",
    ):
        shown.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        did = row.attempts
        is_bad = bool(row.broken())
        shown.add_row(
            row.attack + " *" * row.again,
            row.by,
            f"{did['messages']:,}\n{did['connections']:,}",
            f"{did['bytes'] / MIB:.1f}\n{did['ended']:,}",
            Text(f"{len(row.through)}" if row.through else "nothing"),
            "-" if row.kept is None else f"{row.kept:.2f}\n{row.calm:.1f}",
            f"{row.rise_mib:+.0f}, {row.after_mib:+.0f}",
            "-" if row.answer_ms is None else f"{row.answer_ms:.0f} ({row.echo_ms:.0f})",
            f"{row.written_kib:.0f}",
            f"{row.attacker_cpu:.1f}\n{row.seconds:.1f}",
            style="bold red" if is_bad else "",
        )
    return shown


def poisons_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Losses by what one of five workers sends, and by what the broker does about it."""
    shown = Table(title="one of five workers sends ...: the loss, without and with defences")
    shown.add_column("defence")
    names = list(dict.fromkeys(each["poison"] for each in rows))
    for name in ("(honest)", *names):
        shown.add_column(name, justify="right", no_wrap=True)
    for defence in dict.fromkeys(each["defence"] for each in rows):
        of_it = {each["poison"]: each for each in rows if each["defence"] == defence}
        cells = [
            Text(f"{row['loss']:.2g}", "" if row["held"] else "bold red")
            for row in (of_it[name] for name in names)
        ]
        shown.add_row(defence, f"{of_it[names[0]]['honest']:.2g}", *cells)
    return shown
