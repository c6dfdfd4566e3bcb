"""Where a broker is, by a clock that is only told."""

from __future__ import annotations

from pathlib import Path

from diloco_worker.shell.whereabouts import LOOK_S, Whereabouts


def test_address_that_was_given_stays() -> None:
    found = Whereabouts("tcp://h:1")
    assert found.address == "tcp://h:1"
    assert not found.look(0.0)
    assert found.next_look() is None


def test_file_is_waited_for_and_followed(tmp_path: Path) -> None:
    file = tmp_path / "address"
    found = Whereabouts(f"file://{file}")
    assert not found.look(5.0)
    assert not found.address
    assert found.problem == f"the file {file} is not there yet"
    assert found.next_look() == 5.0 + LOOK_S
    file.write_text("tcp://h:1")
    assert found.look(6.0)
    now: list[str | None] = [found.address, found.problem]
    assert now == ["tcp://h:1", None]
    assert not found.look(7.0), "it is where it was"
    file.write_text("tcp://h:2")
    assert found.look(8.0)


def test_last_address_stays_while_the_file_has_none(tmp_path: Path) -> None:
    file = tmp_path / "address"
    file.write_text("tcp://h:1")
    found = Whereabouts(f"file://{file}")
    assert found.look(0.0)
    file.write_text("tcp://*:1")
    assert not found.look(1.0)
    assert found.address == "tcp://h:1"
    assert found.problem is not None and "holds no address" in found.problem
