"""Command lines: options of experiments with several values, and those of brokers and relays."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import typer

from diloco_tools.processes import Children
from diloco_tools.terminal import fail


def words(text: str) -> list[str]:
    """Those between commas."""
    return [each.strip() for each in text.split(",") if each.strip()]


def whole_numbers(text: str) -> list[int]:
    return [int(each) for each in words(text)]


def numbers(help_text: str, most: int) -> Any:
    """An option of numbers from 1 to `most`."""

    def check(context: typer.Context, param: typer.CallbackParam, text: str) -> str:
        found = words(text)
        if not found or not all(each.isdecimal() and 1 <= int(each) <= most for each in found):
            sentence = f"should be numbers from 1 to {most}, with commas between them"
            fail(context.command_path, f"{param.opts[0]} {text!r} {sentence}", 2)
        return text

    return typer.Option(help=help_text, callback=check)


def choice(name: str, known: Iterable[str], help_text: str, *, several: bool = True) -> Any:
    """An option that is one of the known names, or several; none means all."""
    known = list(known)

    def check(context: typer.Context, text: str) -> str:
        for each in words(text) if several else [text]:
            if each not in known:
                sentence = f"is unknown here; choose from {', '.join(known)}"
                fail(context.command_path, f"{name} {each!r} {sentence}", 2)
        return text

    return typer.Option(name, help=f"{help_text}: {', '.join(known)}.", callback=check)


START_WITHIN_S = 60.0  # for a process of ours to say where it listens, on a busy machine
ANYWHERE = "tcp://127.0.0.1:*"  # an address on this machine that the system chooses


def broker_command(*words: str, inside: Sequence[str] = (), **options: object) -> list[str]:
    """`diloco-broker` with these words and options: `sync_every=6`; True is a flag, False leaves it out.

    `inside` is a command that runs another one somewhere else, by exec.
    """
    command = [*inside, sys.executable, "-m", "diloco_broker", *words]
    for name, value in options.items():
        if value is not False:
            command.append("--" + name.replace("_", "-"))
            command += [] if value is True else [str(value)]
    return command


def make_keys(children: Children, folder: Path, *workers: str, **others: str) -> None:
    """Have the broker's command make keys for these workers, and others by role; raises ChildFailed."""
    keygen = children.start("keygen", broker_command("keygen", str(folder), *workers, **others))
    if keygen.wait(START_WITHIN_S) != 0:
        raise keygen.failure()
