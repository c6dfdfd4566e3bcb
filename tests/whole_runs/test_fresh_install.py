"""The wheel in a new environment, without extras and without this checkout."""

import os
import pty
import re
import select
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from kit.examples import FOLDER
from kit.paths import ROOT
from kit.process_kit import Processes, execute

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]
INSTALLS_WITHIN_S, ENDS_WITHIN_S = 600, 60


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the commands that the wheel has installed, with torch as it is here."""
    folder = tmp_path_factory.mktemp("fresh")
    wheels = folder / "wheels"
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(wheels)]
    subprocess.run([*build, str(ROOT)], check=True, capture_output=True, timeout=INSTALLS_WITHIN_S)
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True, timeout=120)
    found = folder / "venv" / "bin"
    (wheel,) = wheels.glob("*.whl")
    torch = f"torch=={version('torch').partition('+')[0]}"
    index = os.environ.get("TORCH_INDEX")
    where = ["--index-url", index] if index else []
    if why := _refusal([str(found / "pip"), "install", "--quiet", *where, torch]):
        pytest.skip(f"nothing can be installed here: {why}")
    assert not _refusal([str(found / "pip"), "install", "--quiet", str(wheel)])
    return found


def _refusal(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=INSTALLS_WITHIN_S
        )
    except subprocess.TimeoutExpired:
        return f"it took longer than {INSTALLS_WITHIN_S} s"
    return done.stderr[-500:] or "no reason is given" if done.returncode else ""


def test_daemon_hook_and_displays_of_the_base_install_work_together(
    commands: Path, processes: Processes, tmp_path: Path
) -> None:
    options = ("--workers", "1", "--sync-every", "10", "--save-dir", "run")
    binds = ("--bind", "tcp://127.0.0.1:*", "--feed", "tcp://127.0.0.1:*")
    broker = processes.start(execute, str(commands / "diloco-broker"), "serve", *options, *binds)
    server, feed = broker.address(), broker.says("feed ").split()[1]
    script = (commands / "python", FOLDER / "plain_loop.py", "--steps", "40")
    environment = {"PATH": "", "DILOCO_SERVER": server}
    assert "after 4 pushes" in _output(*script, cwd=tmp_path, env=environment)
    assert '"rounds": 4' in _output(commands / "diloco-top", feed, "--json", cwd=tmp_path)
    assert "diloco" in _full_screen([str(commands / "diloco-top"), feed])


def test_every_command_has_a_help_page(commands: Path) -> None:
    names = sorted(each.name for each in commands.glob("diloco-*"))
    assert {"diloco-broker", "diloco-worker", "diloco-top"} <= set(names)
    for name in names:
        assert "Usage" in _output(commands / name, "--help"), name


def _output(*command: str | Path, **options: Any) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(
        words, check=False, capture_output=True, text=True, timeout=ENDS_WITHIN_S, **options
    )
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def _full_screen(command: list[str]) -> str:
    """What it draws on a terminal until the run is seen; `q` then ends it."""
    terminal, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    drawn, until = b"", time.monotonic() + ENDS_WITHIN_S
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    ) as process:
        try:
            os.close(theirs)
            while not re.search(rb"(?i)\blive\b", drawn):
                assert time.monotonic() < until, drawn[-2000:]
                drawn += _read(terminal)
            os.write(terminal, b"q")
            while process.poll() is None:
                assert time.monotonic() < until
                _read(terminal)
        finally:
            process.kill()
            os.close(terminal)
    assert process.returncode == 0
    return drawn.decode(errors="replace")


def _read(terminal: int) -> bytes:
    if not select.select([terminal], [], [], 0.2)[0]:
        return b""
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # the other side has closed it
        return b""
