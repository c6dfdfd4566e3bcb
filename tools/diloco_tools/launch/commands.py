"""Other programs that the launchers call: ours for keys and options, and those of an engine."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from diloco_protocol.errors import UsageError

TIMEOUT_S = 60.0  # of each program
OPERATOR, MONITOR = "launcher", "display"
COMMAND = "diloco-launch"
BROKER = (sys.executable, "-m", "diloco_broker")


def _run(words: Sequence[str], cwd: Path | None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            words,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except OSError as error:
        raise UsageError(f"{words[0]} cannot be started: {error.strerror}.") from None
    except subprocess.TimeoutExpired:
        raise UsageError(f"{words[0]} did not finish within {TIMEOUT_S:g} s.") from None


def output_of(words: Sequence[str], *, cwd: Path | None = None) -> str:
    """Run a program and return what it prints.

    Raises:
        UsageError: it is missing, fails, or times out; with its last line.
    """
    done = _run(words, cwd)
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise UsageError(f"{words[0]} failed: {''.join(said) or f'code {done.returncode}'}")
    return done.stdout


def make_keys(folder: Path, workers: Sequence[str]) -> None:
    """Make the missing keys of a broker, an operator, a monitor, and these workers.

    They are written to files of mode 0600 and never appear on a command line.

    Raises UsageError.
    """
    keygen = (*BROKER, "keygen", str(folder))
    if not (folder / "broker.key").exists():
        output_of([*keygen, "--operator", OPERATOR, "--monitor", MONITOR])
    made = folder / "clients"
    missing = [name for name in workers if not (made / f"worker-{name}.key").exists()]
    if missing:
        output_of([*keygen, *missing])


def serve_words(text: str) -> tuple[str, ...]:
    """The words of `--serve`, split as a shell splits them. Raises UsageError."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"--serve {text!r:.80} cannot be parsed: {error}.") from None


def check_serve_options(options: Sequence[str], cwd: Path) -> None:
    """Raise UsageError, with the message of `diloco-broker serve`, if it rejects these options."""
    if "--fresh" in options:
        raise UsageError(
            "--fresh does not work with a broker that is restarted: each restart would begin a new run. "
            "Use another folder for the new run."
        )
    done = _run([*BROKER, "serve", *options, "--check"], cwd)
    if done.returncode != 0:
        said = "".join(done.stderr.splitlines()[-1:]).removeprefix("Error: ")
        raise UsageError(f"diloco-broker serve rejects these options: {said}")
