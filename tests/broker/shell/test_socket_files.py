"""Brokers at a file of one machine (ipc): who listens there keeps it, who was killed does not."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from diloco_broker.shell.sockets import Sockets
from diloco_protocol.errors import UsageError


def test_a_second_broker_at_the_same_file_is_refused_and_the_first_stays(tmp_path: Path) -> None:
    control, feed = (f"ipc://{tmp_path / name}" for name in ("control", "feed"))
    first = Sockets(control, feed)
    try:
        with pytest.raises(UsageError, match="--bind ipc://"):
            Sockets(control, f"ipc://{tmp_path / 'other'}")
        with pytest.raises(UsageError, match="--feed ipc://"):
            Sockets(f"ipc://{tmp_path / 'other'}", feed)
        with socket.socket(socket.AF_UNIX) as worker:
            worker.connect(str(tmp_path / "control"))
    finally:
        first.close()


def test_the_file_of_a_broker_that_was_killed_is_taken_over(tmp_path: Path) -> None:
    for name in ("control", "feed"):
        with socket.socket(socket.AF_UNIX) as killed:
            killed.bind(str(tmp_path / name))
        assert (tmp_path / name).is_socket()
    Sockets(f"ipc://{tmp_path / 'control'}", f"ipc://{tmp_path / 'feed'}").close()
