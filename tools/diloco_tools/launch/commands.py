"""Other programs that the launchers call: ours for keys and options, and those of an engine."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from diloco_protocol.errors import UsageError

# Seconds that any of them may take.
PATIENCE_S = 60.0
OPERATOR, MONITOR = "launcher", "display"
COMMAND = "diloco-launch"


def output_of(words: Sequence[str], *, cwd: Path | None = None) -> str:
    """What a program prints.

    Raises:
        UsageError: it is not there, fails, or takes too long; with what it says.
    """
    try:
        done = subprocess.run(
            words,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except OSError as error:
        raise UsageError(f"{words[0]} cannot be started: {error.strerror}.") from None
    except subprocess.TimeoutExpired:
        raise UsageError(f"{words[0]} has not answered within {PATIENCE_S:g} s.") from None
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise UsageError(f"{words[0]} failed: {''.join(said) or f'code {done.returncode}'}")
    return done.stdout


def make_keys(folder: Path, workers: Sequence[str]) -> None:
    """Keys of a broker, an operator, a monitor, and of these workers; what is there stays.

    They are written to files of mode 0600 and stand on no command line.

    Raises UsageError.
    """
    if not (folder / "broker.key").exists():
        _keygen(folder, "--operator", OPERATOR, "--monitor", MONITOR)
    made = folder / "clients"
    missing = [name for name in workers if not (made / f"worker-{name}.key").exists()]
    if missing:
        _keygen(folder, *missing)


def _keygen(folder: Path, *words: str) -> None:
    output_of([sys.executable, "-m", "diloco_broker", "keygen", str(folder), *words])


def serve_words(text: str) -> tuple[str, ...]:
    """The words of `--serve`, split as a shell splits them. Raises UsageError."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"--serve {text!r:.80} cannot be read: {error}.") from None


def check_serve_options(options: Sequence[str], cwd: Path) -> None:
    """Raise UsageError with the sentence of `diloco-broker serve` for options that it would refuse."""
    if "--fresh" in options:
        raise UsageError(
            "--fresh is not for a broker that is restarted: each restart would begin a new run. Use "
            "another folder for the new run."
        )
    words = [sys.executable, "-m", "diloco_broker", "serve", *options, "--check"]
    done = subprocess.run(
        words,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode != 0:
        said = "".join(done.stderr.splitlines()[-1:]).removeprefix("Error: ")
        raise UsageError(f"The broker would not start: {said}")
