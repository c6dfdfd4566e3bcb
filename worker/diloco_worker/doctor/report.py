"""What the findings come to: lines for people, one object for programs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from diloco_protocol import feed, quantities
from diloco_protocol.chunks import CHUNK_ELEMENTS
from diloco_protocol.dtypes import SIZES
from diloco_protocol.quantities import estimate_s
from diloco_worker.doctor import round_cost
from diloco_worker.doctor.examination import Fault, Findings
from diloco_worker.doctor.line import Rate
from diloco_worker.doctor.round_cost import Exchange, Line

SHARE = 0.95  # of the time, that training should have
# Dtypes of pushes and replies, from those that round least to those that need the fewest bytes.
DTYPES = (
    ("bf16", "fp32"),
    ("bf16", "bf16"),
    ("int8", "int8"),
    ("int4", "int4"),
    ("int4z", "int4z"),
)
# What was looked at by the time that each fault is found.
_ROWS = {
    Fault.NAME: "name",
    Fault.PORT: "port",
    Fault.NOT_A_BROKER: "broker",
    Fault.NO_KEY: "keys",
    Fault.KEY_FILE: "keys",
    Fault.WRONG_KEY: "keys",
    Fault.UNWANTED_KEY: "keys",
    Fault.VERSION: "version",
    Fault.SILENT: "broker",
    Fault.CLOCK: "clocks",
    Fault.LINE: "line",
}
_GOOD, _BAD, _NOTE = ("✓", "green"), ("✗", "bold red"), ("·", "yellow")


@dataclass(frozen=True)
class Estimate:
    """What a round costs on the line that was measured; `step_time` is of an inner step, if known."""

    exchange: Exchange
    line: Line
    wire_dtype: str
    reply_dtype: str
    sync_every: int
    step_time: float | None

    @property
    def seconds(self) -> float:
        return round_cost.round_seconds(self.exchange, self.line)

    @property
    def needed(self) -> int | None:
        """The least H with which training has its share of the time."""
        if self.step_time is None:
            return None
        return round_cost.sync_every_for(self.exchange, self.line, self.step_time, SHARE)

    @property
    def utilisation(self) -> float | None:
        """The share of time that training has with the run's H."""
        if self.step_time is None:
            return None
        return round_cost.utilisation(self.exchange, self.line, self.step_time, self.sync_every)

    def with_dtypes(self, wire: str, reply: str) -> Estimate:
        """The same in a run with these dtypes."""
        up, down = SIZES[wire].element, SIZES[reply].element
        exchange = replace(self.exchange, wire_bytes=up, reply_bytes=down)
        return replace(self, exchange=exchange, wire_dtype=wire, reply_dtype=reply)

    @property
    def shorter(self) -> list[Estimate]:
        """Rounds in other dtypes that take less time; those that round least come first."""
        others = [self.with_dtypes(wire, reply) for wire, reply in DTYPES]
        return [each for each in others if each.seconds < 0.98 * self.seconds]


def estimate(
    findings: Findings, parameters: int | None, step_time: float | None
) -> Estimate | None:
    """Of the run's own model where `parameters` is None; None where something is not known."""
    status = findings.status
    if status is None or not (findings.trips and findings.up and findings.down):
        return None
    size = parameters or (status.model.parameters if status.model else 0)
    if not size or status.wire_dtype not in SIZES or status.reply_dtype not in SIZES:
        return None
    pieces, every = status.num_fragments or 1, status.sync_every or 1
    exchange = Exchange(
        size,
        SIZES[status.wire_dtype].element,
        SIZES[status.reply_dtype].element,
        CHUNK_ELEMENTS,
        pieces,
        is_whole=status.reducer.staged or status.asynchronous is not None,
        delay=_delay(status, every, pieces),
    )
    line = Line(findings.up.bytes_per_s, findings.down.bytes_per_s, findings.trips.median)
    return Estimate(exchange, line, status.wire_dtype, status.reply_dtype, every, step_time)


def _delay(status: feed.Snapshot, every: int, pieces: int) -> float:
    """Steps that a worker makes while a fragment is on its way, before it waits."""
    if status.fragment_max_delay is not None:
        return status.fragment_max_delay
    if status.fragment_delay_auto:
        return every / (pieces if pieces > 1 else 2)
    return status.fragment_sync_delay


def exit_code(findings: Findings) -> int:
    """0 where all is well."""
    return int(findings.wrong[0].fault) if findings.wrong else 0


def as_text(findings: Findings, found: Estimate | None, of_all: str | None = None) -> Group:
    """A line for each thing, what is wrong at its place, and what a round takes; `of_all` workers."""
    wrong = {_ROWS.get(each.fault, "address"): each.text for each in findings.wrong}
    table = Table.grid(padding=(0, 1))
    for name, value in _rows(findings).items():
        if name in wrong:
            _row(table, _BAD, name, wrong.pop(name))
        elif value is not None:
            _row(table, _GOOD, name, value)
    for name, sentence in wrong.items():
        _row(table, _BAD, name, sentence)
    for note in findings.notes:
        _row(table, _NOTE, "", note)
    parts: list[Text | Table] = [Text(f"diloco-worker doctor  {findings.server}\n", "bold"), table]
    if found is not None:
        said = _sentences(found) if of_all is None else [*_sentences(found), of_all]
        parts.append(Text("\n" + "\n".join(said)))
    elif findings.up and findings.down:
        parts.append(
            Text("\nNo model is in this run yet; --parameters N tells what a round would take.")
        )
    return Group(*parts)


def _row(table: Table, mark: tuple[str, str], name: str, value: str) -> None:
    table.add_row(Text(f"  {mark[0]}", mark[1]), Text(name, "dim"), Text(value))


def _rows(findings: Findings) -> dict[str, str | None]:
    """What was found, by its name, in the order in which it was looked at."""
    status, trips, clocks = findings.status, findings.trips, findings.clocks
    found: dict[str, str | None] = dict.fromkeys(("address", "name", "port", "broker", "keys"))
    if status is not None:
        number, alive = status.round.number if status.round else 0, status.counts.alive
        workers = quantities.plural(alive, "worker")
        found["broker"] = f"release {status.version}, round {number}, {workers}"
        found["keys"] = f"{findings.keys.peer}, let in" if findings.keys else "none needed"
    if clocks is not None:
        apart, error = abs(clocks.ahead) * 1e3, clocks.error * 1e3
        found["clocks"] = f"{apart:,.1f} ms apart, give or take {error:.1f} ms"
    if trips is not None:
        median, worst = trips.median * 1e3, trips.worst * 1e3
        found["round trip"] = f"{median:.2f} ms median, {worst:.2f} ms worst of {trips.count}"
    found |= {"up": _rate(findings.up), "down": _rate(findings.down)}
    return found


def _rate(rate: Rate | None) -> str | None:
    if rate is None:
        return None
    return ("at least " if rate.is_at_least else "") + quantities.estimate(rate.bytes_per_s, "B/s")


def _sentences(found: Estimate) -> list[str]:
    exchange = found.exchange
    many = f" in {exchange.fragments} fragments" if exchange.fragments > 1 else ""
    size = quantities.parameters(exchange.parameters)
    up = quantities.estimate(exchange.bytes_up, "B")
    down = quantities.estimate(exchange.bytes_down, "B")
    lines = [
        f"A round of {size} parameters{many} ({up} up in {found.wire_dtype}, {down} down in "
        f"{found.reply_dtype}) takes {estimate_s(found.seconds)}."
    ]
    if found.step_time is None:
        trains = round_cost.training_seconds(found.seconds, SHARE)
        lines.append(
            f"Training has {SHARE:.0%} of the time where H steps take {estimate_s(trains)}; --step-time "
            "SECONDS tells H."
        )
    else:
        lines.append(
            f"With steps of {estimate_s(found.step_time)} training has {SHARE:.0%} of the time from "
            f"H = {found.needed} on; the run's H = {found.sync_every} (sync_every) gives "
            f"{found.utilisation:.0%}."
        )
    return [*lines, *_of_other_dtypes(found)]


def _of_other_dtypes(found: Estimate) -> list[str]:
    """Which dtypes to take where the run's cost too much time, or what each would take."""
    if not found.shorter:
        return []
    if found.utilisation is None:
        each = (
            f"{e.wire_dtype} {estimate_s(e.seconds)}"
            for e in found.shorter
            if e.reply_dtype == e.wire_dtype
        )
        return [f"In fewer bytes, with --wire-dtype and --reply-dtype: {', '.join(each)}."]
    if found.utilisation >= SHARE:
        return ["Its dtypes are good enough for this line."]
    least = min(each.seconds for each in found.shorter)
    near = next(each for each in found.shorter if each.seconds <= 1.02 * least)
    enough = (each for each in found.shorter if (each.utilisation or 0.0) >= SHARE)
    best = next(enough, near)
    return [
        f"With --wire-dtype {best.wire_dtype} --reply-dtype {best.reply_dtype} at the broker a round "
        f"takes {estimate_s(best.seconds)}, and training has {best.utilisation:.0%} of the time."
    ]


def as_plain(
    findings: Findings, found: Estimate | None, of_all: dict[str, Any] | None = None
) -> dict[str, Any]:
    """For programs: seconds, bytes and bytes a second; null is what is not known.

    `of_all`: what a round of all workers takes, if there are several.
    """
    status, keys, clocks = findings.status, findings.keys, findings.clocks
    trips, up, down = findings.trips, findings.up, findings.down
    return {
        "server": findings.server,
        "exit_code": exit_code(findings),
        "wrong": [
            {"code": int(each.fault), "name": each.fault.name.lower(), "text": each.text}
            for each in findings.wrong
        ],
        "notes": findings.notes,
        "asks_for_keys": findings.with_keys,
        "key": keys and {"role": keys.peer.role.value, "name": keys.peer.name},
        "version": status and status.version,
        "run": status and status.run,
        "clock_ahead_s": clocks and round(clocks.ahead, 6),
        "clock_error_s": clocks and round(clocks.error, 6),
        "round_trip_s": trips and {"median": trips.median, "worst": trips.worst},
        "up_bytes_per_s": up and round(up.bytes_per_s),
        "down_bytes_per_s": down and round(down.bytes_per_s),
        "is_at_least": bool(up and down and (up.is_at_least or down.is_at_least)),
        "round": found
        and {
            "parameters": found.exchange.parameters,
            "fragments": found.exchange.fragments,
            "bytes_up": found.exchange.bytes_up,
            "bytes_down": found.exchange.bytes_down,
            "seconds": round(found.seconds, 6),
            "step_time_s": found.step_time,
            "sync_every": found.sync_every,
            "utilisation": found.utilisation,
            "sync_every_for_95": found.needed,
            "of_all_workers": of_all,
            "in_other_dtypes": [
                {
                    "wire_dtype": each.wire_dtype,
                    "reply_dtype": each.reply_dtype,
                    "seconds": round(each.seconds, 6),
                    "utilisation": each.utilisation,
                }
                for each in found.shorter
            ],
        },
    }
