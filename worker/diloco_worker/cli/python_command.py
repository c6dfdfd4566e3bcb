"""Which word of a command is the Python script: `diloco_worker.auto` is put in front of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath

from diloco_protocol import UsageError

AUTO = ("-m", "diloco_worker.auto")
_PYTHON = re.compile(r"(python|pypy)[0-9.]*(t|d)?(\.exe)?")
# Options of the interpreter with a word of their own behind them, unless it is attached.
_WITH_A_WORD = ("-X", "-W", "--check-hash-based-pycs")
# Start the script in processes of their own: as programs, and as modules.
LAUNCHERS = frozenset({"torchrun", "accelerate", "deepspeed", "fabric", "mpirun", "horovodrun"})
_LAUNCHING = re.compile(
    r"torch\.distributed\.(run|launch)|accelerate(\.commands\..*)?|deepspeed(\.launcher\..*)?|"
    r"lightning\.fabric(\.cli)?"
)


def with_auto(command: Sequence[str]) -> list[str]:
    """`python [OPTIONS] SCRIPT ...` or `python [OPTIONS] -m MODULE ...`, run by `diloco_worker.auto`.

    Raises:
        UsageError: another program, or no script.
    """
    refuse_launcher(command)
    if not _PYTHON.fullmatch(PurePath(command[0]).name):
        raise UsageError(
            f"--auto needs a command like python train.py, but it begins with {command[0]!r:.200}; put "
            f"`{' '.join(AUTO)}` in front of the script where that program starts it."
        )
    place = 1
    while place < len(command) and command[place].startswith("-") and command[place] != "-m":
        if command[place] in ("-", "-c") or command[place].startswith(("-c", "-m")):
            break
        place += 2 if command[place] in _WITH_A_WORD else 1
    rest = list(command[place:])
    if not rest or rest == ["-m"] or (rest[0].startswith("-") and rest[0] != "-m"):
        raise UsageError(
            "--auto needs a script or -m MODULE behind python; code of -c or of the standard input has "
            "no file to run."
        )
    refuse_launcher(rest)
    return [*command[:place], *AUTO, *rest]


def refuse_launcher(words: Sequence[str]) -> None:
    """Raise UsageError where `PROGRAM ...`, `SCRIPT ...` or `-m MODULE ...` launches processes."""
    module = words[1] if words[0] == "-m" and len(words) > 1 else ""
    name = module or PurePath(words[0]).name
    if name in LAUNCHERS or _LAUNCHING.fullmatch(module):
        raise UsageError(
            f"{name} starts the script in processes of its own, where --auto is not: the script would "
            "train alone. Where it is one process, start it by python train.py; several become one "
            'worker by a DiLoCoWorker with process_group="world" in the script, without --auto '
            "(docs/frameworks.md)."
        )
