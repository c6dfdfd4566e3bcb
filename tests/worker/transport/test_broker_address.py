"""The addresses of a broker, with a simulated clock."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from diloco_worker.transport.broker_address import ANSWER_S, LOOK_S, BrokerAddress


def test_given_addresses_stay_and_are_turned_to_by_number() -> None:
    found = BrokerAddress("h:1, tcp://k:2,ipc:///x")
    assert (found.count, found.address, found.next_look()) == (3, "tcp://h:1", None)
    found.turn_to(1)
    assert found.address == "tcp://k:2"
    assert not found.look(0.0)
    assert found.names("tcp://k:2") == "tcp://h:1 and tcp://k:2 and ipc:///x"


def test_path_of_a_file_may_have_a_comma(tmp_path: Path) -> None:
    file = tmp_path / "a,b"
    file.write_text("tcp://h:1")
    found = BrokerAddress(f"file://{file}")
    assert found.look(0.0)
    assert (found.count, found.address) == (1, "tcp://h:1")


def test_file_is_awaited_and_followed(tmp_path: Path) -> None:
    file = tmp_path / "address"
    found = BrokerAddress(f"file://{file}")
    assert not found.look(5.0)
    assert not found.address
    assert found.problem == f"the file {file} does not exist yet"
    assert found.next_look() == 5.0 + LOOK_S
    file.write_text("tcp://h:1")
    assert found.look(6.0)
    now: list[str | None] = [found.address, found.problem]
    assert now == ["tcp://h:1", None]
    assert not found.look(7.0), "unchanged"
    file.write_text("tcp://h:2")
    assert found.look(8.0)


def test_last_address_stays_while_the_file_has_none(tmp_path: Path) -> None:
    file = tmp_path / "address"
    file.write_text("tcp://h:1")
    found = BrokerAddress(f"file://{file}")
    assert found.look(0.0)
    file.write_text("tcp://*:1")
    assert not found.look(1.0)
    assert found.address == "tcp://h:1"
    assert found.problem is not None and "has no address" in found.problem


def looks_until(found: BrokerAddress, is_done: Callable[[], bool]) -> int:
    """How often it polled, with the times that it asks for."""
    looks = 0
    deadline = time.monotonic() + 10.0
    while not is_done():
        assert time.monotonic() < deadline
        at = found.next_look()
        assert at is not None
        found.look(at)
        looks += 1
        time.sleep(0.001)  # the function answers in another thread
    return looks


def test_slow_function_is_called_repeatedly_in_its_thread() -> None:
    places = iter(["h:1", " tcp://h:2 ", "tcp://h:2"])
    asked = threading.Semaphore(0)
    answers = threading.Semaphore(0)

    def place() -> str:
        asked.release()
        assert answers.acquire(timeout=10.0)
        return next(places)

    found = BrokerAddress(place)
    assert not found.look(0.0)
    assert asked.acquire(timeout=10.0)
    assert found.problem == "server() has not answered yet"
    assert found.next_look() == ANSWER_S, "it does not wait for the function"
    found.look(0.1)
    assert not asked.acquire(blocking=False), "nor call it twice at a time"
    answers.release()
    looks_until(found, lambda: found.address == "tcp://h:1")
    answers.release()
    looks_until(found, lambda: found.address == "tcp://h:2")


@pytest.mark.parametrize("said", [None, 5, "", "tcp://*:1", "h:x", "file:///x", "tcp://0.0.0.0:1"])
def test_function_without_an_address_is_logged_and_called_again(said: object) -> None:
    answers = iter([said, "h:1"])
    found = BrokerAddress(lambda: cast(str, next(answers)))
    looks_until(found, lambda: "returned" in (found.problem or ""))
    assert found.problem is not None and "no address like" in found.problem
    looks_until(found, lambda: found.address == "tcp://h:1")


def test_failing_function_keeps_the_last_address() -> None:
    answers = ["h:1"]

    def place() -> str:
        if not answers:
            raise OSError("no route")
        return answers.pop()

    found = BrokerAddress(place)
    looks_until(found, lambda: found.address is not None)
    looks_until(found, lambda: found.problem is not None)
    assert found.problem == "server() failed: OSError('no route')"
    assert found.address == "tcp://h:1"
