"""`diloco-broker replay`: feed a tape to a core and print the first difference."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from diloco_broker.cli import failing_in_a_sentence
from diloco_broker.core.effects import Log, Send
from diloco_broker.core.state import RunState
from diloco_broker.core.tape import Step
from diloco_broker.core.tape import replay as replayed
from diloco_broker.storage.tape_file import read_tape
from diloco_protocol.quantities import duration, plural


def replay(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Tape written by serve --tape FILE.")
    ],
    until: Annotated[
        int | None,
        typer.Option(metavar="ROUND", min=0, help="Round at which to stop. Default: replay all."),
    ] = None,
    story: Annotated[
        str | None, typer.Option(metavar="WORKER", help="Worker whose events are printed.")
    ] = None,
) -> None:
    """Replay a tape: feed every event to a broker's core again and compare the effects.

    Prints the first difference and exits with 1. A difference means that this release decides
    differently from the broker that wrote the tape, or that the machine of that broker had a fault.
    """
    with failing_in_a_sentence(), read_tape(file) as tape:
        made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(tape.unix_s))
        typer.echo(f"Tape of broker {tape.version}, started {made}.")
        state, began, events = tape.core.state, None, 0
        first = state.totals.rounds
        for step in replayed(tape.core, tape.entries):
            now = step.entry.now.core
            began = now if began is None else began
            events += 1
            if story is not None and (said := _of_worker(step, story, tape.core.state)):
                typer.echo(f"{now - began:10.3f} s  {said}")
            if step.difference is not None:
                typer.echo(
                    f"Event {events}, {step.about}, {now - began:.3f} s after the start, in round "
                    f"{step.about.number}: {step.difference}.",
                    err=True,
                )
                raise typer.Exit(1)
            if until is not None and state.round is not None and state.round.number >= until:
                break
        seconds = duration(0.0 if began is None else now - began)
        rounds = plural(state.totals.rounds - first, "round")
        typer.echo(f"{plural(events, 'event')} of {seconds}, {rounds}: all effects are identical.")


def _of_worker(step: Step, worker_id: str, state: RunState) -> str:
    """Describe an event that concerns this worker; empty for any other."""
    member = state.members.named(worker_id)
    own = [] if member is None else member.routes
    sent = [e for e in step.asked_for if isinstance(e, Send) and e.route in own]
    logged = [e.text for e in step.asked_for if isinstance(e, Log) and worker_id in e.text]
    if step.about.worker_id != worker_id and not sent and not logged:
        return ""
    kinds = [type(each.message).__name__ for each in sent]
    said = [str(step.about), *([f"sent {', '.join(kinds)}"] if kinds else []), *logged]
    return f"round {step.about.number}: {'; '.join(said)}"
