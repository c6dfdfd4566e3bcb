"""diloco-top as it goes on: --follow, the listening thread, connecting again; and without textual."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from typing import IO

import pytest

from diloco_tools.monitor.feed.listener import FeedSubscriber
from kit.feed_snapshots import LOST, PATIENCE_S, Publisher, frame, status
from kit.top_text import top_of


@contextmanager
def following(*arguments: str) -> Iterator[IO[str]]:
    """The output of diloco-top as a process of its own, for as long as the tests have patience."""
    clean = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    command = [sys.executable, "-m", "diloco_tools.monitor.terminal.cli", *arguments, "--follow"]
    with subprocess.Popen(
        [*command, "--timeout", str(PATIENCE_S)],
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        encoding="utf-8",
        env=clean | {"COLUMNS": "80", "PYTHONIOENCODING": "utf-8"},
    ) as process:
        # A silent pipe must not block the test.
        guard = threading.Timer(PATIENCE_S, process.kill)
        guard.start()
        try:
            assert process.stdout is not None
            yield process.stdout
        finally:
            guard.cancel()
            process.kill()


def test_json_follow_is_a_line_for_each_snapshot(publisher: Publisher) -> None:
    with following(publisher.address, "--json") as lines:
        publisher.await_subscriber()
        publisher.send(frame(status(sequence=1)))
        assert json.loads(next(lines))["sequence"] == 1
        publisher.send(frame(status(sequence=1)), frame(LOST | {"sequence": 2}))
        second = json.loads(next(lines))
        assert (second["sequence"], second["monitor"]["verdict"]) == (2, "degraded")
        publisher.close()
        with Publisher(publisher.address) as again:
            again.await_subscriber()
            again.send(frame(status(sequence=1, epoch="cd34")))
            assert json.loads(next(lines))["epoch"] == "cd34"


def test_text_follow_is_a_screen_after_another_and_tells_of_silence(publisher: Publisher) -> None:
    def screen(lines: IO[str]) -> str:
        return "".join(takewhile(lambda line: "round 20 closed" not in line, lines))

    with following(publisher.address, "--once") as lines:
        publisher.await_subscriber()
        publisher.send(frame(status(sequence=1)))
        assert "● LIVE" in screen(lines)
        publisher.send(frame(LOST | {"sequence": 2}))
        assert "◐ DEGRADED" in screen(lines)
        assert "◐ LATE" in screen(lines)


def test_ascii_prints_no_other_sign(publisher: Publisher) -> None:
    result = top_of(publisher, LOST, "--ascii")
    assert result.stdout.isascii()
    assert "x lost" in result.stdout


@pytest.mark.parametrize("options", [("--once",), ("--json",), ()])
def test_text_and_json_do_without_textual(publisher: Publisher, options: tuple[str, ...]) -> None:
    without = "import sys; sys.modules['textual'] = None; "
    code = without + "from diloco_tools.monitor.terminal.cli import app; app()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, publisher.address, *options, "--timeout", str(PATIENCE_S)],
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
    )
    try:
        publisher.await_subscriber()
        publisher.send(frame(status()))
        output, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0
    assert "3fa2c1d0" in output


def test_subscriber_connects_again_after_silence(publisher: Publisher) -> None:
    with FeedSubscriber(publisher.address, renew_after_s=0.0) as feed:
        publisher.await_subscriber()
        before = feed._socket
        assert feed.receive(0.0) is None
        assert before.closed, "what it had is not left open"
        publisher.await_subscriber()
