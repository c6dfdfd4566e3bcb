"""diloco-top as it goes on: --follow, connecting again; and without textual."""

import json
import sys
from typing import Any

import pytest

from diloco_tools.monitor.feed.listener import FeedSubscriber
from kit.feed_snapshots import LOST, PATIENCE_S, Publisher, frame, status
from kit.process_kit import Child, Processes, interpret, wait_for
from kit.top_text import top_of


def following(processes: Processes, *arguments: str) -> Child:
    """diloco-top as a process of its own, for as long as the tests have patience."""
    command = ("-m", "diloco_tools.monitor.terminal.cli", *arguments, "--follow")
    clean = {"NO_COLOR": "", "FORCE_COLOR": "", "COLUMNS": "80"}
    return processes.run(*command, "--timeout", str(PATIENCE_S), **clean)


def test_json_follow_is_a_line_for_each_snapshot(
    publisher: Publisher, processes: Processes
) -> None:
    top = following(processes, publisher.address, "--json")

    def line(number: int) -> Any:
        wait_for(lambda: top.output.count("\n") >= number)
        return json.loads(top.output.splitlines()[number - 1])

    publisher.await_subscriber()
    publisher.send(frame(status(sequence=1)))
    assert line(1)["sequence"] == 1
    publisher.send(frame(status(sequence=1)), frame(LOST | {"sequence": 2}))
    second = line(2)
    assert (second["sequence"], second["monitor"]["verdict"]) == (2, "degraded")
    publisher.close()
    with Publisher(publisher.address) as again:
        again.await_subscriber()
        again.send(frame(status(sequence=1, epoch="cd34")))
        assert line(3)["epoch"] == "cd34"


def test_text_follow_is_a_screen_after_another_and_tells_of_silence(
    publisher: Publisher, processes: Processes
) -> None:
    top = following(processes, publisher.address, "--once")

    def screen(number: int) -> str:
        wait_for(lambda: top.output.count("round 20 closed") >= number)
        return top.output.split("round 20 closed")[number - 1]

    publisher.await_subscriber()
    publisher.send(frame(status(sequence=1)))
    assert "● LIVE" in screen(1)
    publisher.send(frame(LOST | {"sequence": 2}))
    assert "◐ DEGRADED" in screen(2)
    assert "◐ LATE" in screen(3)


def test_ascii_prints_no_other_sign(publisher: Publisher) -> None:
    result = top_of(publisher, LOST, "--ascii")
    assert result.stdout.isascii()
    assert "x lost" in result.stdout


def without_textual(*command: str) -> None:
    sys.modules["textual"] = None  # type: ignore[assignment]
    interpret("-m", "diloco_tools.monitor.terminal.cli", *command)


@pytest.mark.parametrize("options", [("--once",), ("--json",), ()])
def test_text_and_json_do_without_textual(
    publisher: Publisher, processes: Processes, options: tuple[str, ...]
) -> None:
    command = (publisher.address, *options, "--timeout", str(PATIENCE_S))
    top = processes.start(without_textual, *command)
    publisher.await_subscriber()
    publisher.send(frame(status()))
    assert top.ends() == 0
    assert "3fa2c1d0" in top.output


def test_subscriber_connects_again_after_silence(publisher: Publisher) -> None:
    with FeedSubscriber(publisher.address, renew_after_s=0.0) as feed:
        publisher.await_subscriber()
        before = feed._socket
        assert feed.receive(0.0) is None
        assert before.closed, "what it had is not left open"
        publisher.await_subscriber()
