"""diloco-dashboard and diloco-exporter as commands, in processes of their own and in this one."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from typer.testing import CliRunner, Result

NOBODY = "tcp://127.0.0.1:1"  # a feed that never speaks


@contextmanager
def started(module: str, *options: str, **env: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The running command, on a free port, and the address in the line that it printed."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", module, "--port", "0", *options]
    environment = {"PATH": "/usr/bin:/bin", **env}
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith(("dashboard http://", "diloco-exporter: http://")), line
            (address,) = (word for word in line.split() if word.startswith("http://"))
            yield process, address
        finally:
            process.kill()


def run(app: typer.Typer, *options: str, **environment: str) -> Result:
    return CliRunner(env={"DILOCO_FEED": None, **environment}).invoke(app, list(options))


def refusal(app: typer.Typer, *options: str) -> str:
    """The one sentence of a start that failed with exit code 2."""
    result = run(app, *options)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    (sentence,) = result.stderr.splitlines()
    return sentence
