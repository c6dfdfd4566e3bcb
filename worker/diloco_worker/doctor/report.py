"""The findings as lines for people, and as one object for programs."""

from __future__ import annotations

import shlex
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from diloco_protocol import quantities
from diloco_worker.doctor.examination import Fault, Findings
from diloco_worker.doctor.line import Rate

# Share of a link that carries payload, as `diloco-plan` assumes. The rates measured here are payload.
USABLE = 0.95
# The row in which each fault is shown.
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


def exit_code(findings: Findings) -> int:
    """0 without a fault, else the code of the first one."""
    return int(findings.wrong[0].fault) if findings.wrong else 0


def plan_command(
    findings: Findings, parameters: int | None = None, step_time: float | None = None
) -> str | None:
    """The `diloco-plan` command for this run over the measured link; None while something is unknown.

    All workers' links and the broker's are assumed to be like the measured one.

    Args:
        parameters: of the model; None: those of the run's model.
        step_time: seconds of an optimizer step; None leaves the planner's default.
    """
    status, trips = findings.status, findings.trips
    if status is None or trips is None or findings.up is None or findings.down is None:
        return None
    size = parameters or (status.model.parameters if status.model else 0)
    if not size:
        return None
    up, down = (8 * rate.bytes_per_s / USABLE / 1e6 for rate in (findings.up, findings.down))
    is_async = status.asynchronous is not None
    delay = "auto" if status.fragment_delay_auto else status.fragment_sync_delay
    options: dict[str, object] = {
        "parameters": size,
        "workers": max(1, status.counts.alive),
        "broker-link": _megabits(min(up, down)),
        "link": f"{_megabits(up)}/{_megabits(down)}",
        "delay": f"{trips.median * 1e3:.2f}ms",
        "step-time": None if step_time is None else f"{step_time:g}s",
        "sync-every": status.sync_every or 1,
        "num-fragments": status.num_fragments or 1,
        "fragment-sync-delay": delay or 0,
        "wire-dtype": status.wire_dtype,
        "reply-dtype": status.reply_dtype,
        "mode": "async" if is_async else "sync",
    }
    words = [
        word
        for name, value in options.items()
        if value is not None
        for word in (f"--{name}", str(value))
    ]
    words += ["--whole"] if status.reducer.staged and not is_async else []
    words += ["--keys"] if findings.with_keys else []
    return shlex.join(["diloco-plan", *words])


def _megabits(rate: float) -> str:
    return f"{rate:.0f}m" if rate >= 10 else f"{rate:.2f}m"


def as_text(findings: Findings, command: str | None) -> Group:
    """A row for each item, each fault in its row, and the command that plans a round."""
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
    if command is not None:
        parts.append(Text(f"\nHow long a round takes, and which H to choose:\n\n    {command}"))
    elif findings.up and findings.down:
        parts.append(
            Text("\nThe run has no model yet; --parameters N prints a diloco-plan command.")
        )
    return Group(*parts)


def _row(table: Table, mark: tuple[str, str], name: str, value: str) -> None:
    table.add_row(Text(f"  {mark[0]}", mark[1]), Text(name, "dim"), Text(value))


def _rows(findings: Findings) -> dict[str, str | None]:
    """What was found, by name, in the order of the examination."""
    status, trips, clocks = findings.status, findings.trips, findings.clocks
    found: dict[str, str | None] = dict.fromkeys(("address", "name", "port", "broker", "keys"))
    if status is not None:
        number, alive = status.round.number if status.round else 0, status.counts.alive
        workers = quantities.plural(alive, "worker")
        found["broker"] = f"release {status.version}, round {number}, {workers}"
        found["keys"] = f"{findings.keys.peer}, accepted" if findings.keys else "none needed"
    if clocks is not None:
        apart, error = abs(clocks.ahead) * 1e3, clocks.error * 1e3
        found["clocks"] = f"{apart:,.1f} ms apart, ±{error:.1f} ms"
    if trips is not None:
        median, worst = trips.median * 1e3, trips.worst * 1e3
        found["round trip"] = f"{median:.2f} ms median, {worst:.2f} ms worst of {trips.count}"
    return found | {"up": _rate(findings.up), "down": _rate(findings.down)}


def _rate(rate: Rate | None) -> str | None:
    if rate is None:
        return None
    return ("at least " if rate.is_at_least else "") + quantities.estimate(rate.bytes_per_s, "B/s")


def as_plain(findings: Findings, command: str | None) -> dict[str, Any]:
    """For programs: seconds and bytes a second; null where unknown."""
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
        "plan_command": command,
    }
