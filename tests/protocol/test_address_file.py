"""A file that says where a broker is: written as a whole, and not believed blindly."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from diloco_protocol.clients.address_file import (
    NoAddress,
    file_of,
    read_address,
    resolved,
    write_address,
)
from diloco_protocol.errors import UsageError


def test_what_was_written_is_read(tmp_path: Path) -> None:
    file = tmp_path / "address"
    for port in (1, 2):
        write_address(file, f"tcp://10.0.0.1:{port}", f"tcp://[::1]:{port}")
        assert read_address(file) == f"tcp://10.0.0.1:{port}"
        assert resolved(f"file://{file}", line=1) == f"tcp://[::1]:{port}"
    assert list(tmp_path.iterdir()) == [file], "nothing is left beside it"


def test_broker_on_every_address_is_found_by_the_name_of_its_machine(tmp_path: Path) -> None:
    file = tmp_path / "address"
    write_address(file, "tcp://0.0.0.0:8512", "tcp://[::]:8513")
    name = socket.gethostname()
    assert [read_address(file, line) for line in (0, 1)] == [
        f"tcp://{name}:8512",
        f"tcp://{name}:8513",
    ]


def test_file_that_a_person_wrote_will_do(tmp_path: Path) -> None:
    file = tmp_path / "address"
    file.write_text(" gpu-box:8512 \n")
    assert read_address(file) == "tcp://gpu-box:8512"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b" \n",
        b"\ntcp://h:1",
        b"h",
        b"tcp://h:0",
        b"tcp://h:65536",
        b"tcp://*:8512",
        b"tcp://0.0.0.0:8512",
        b"tcp://:8512",
        b"tcp://h:8512;tcp://evil:1",
        b"tcp://eth0;h:8512",
        b"tcp://h h:8512",
        b"tcp://h\x1b[2J:8512",
        "tcp://h\u00e9:8512".encode(),
        b"udp://h:8512",
        b"file:///etc/passwd",
        b"inproc://x",
        b"ipc://",
        b"tcp://h:8512\n" + b"x" * 1024,
        b"\xff\xfe\x00",
    ],
)
def test_anything_else_in_it_is_no_address(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "address"
    file.write_bytes(content)
    with pytest.raises(NoAddress, match=r"empty|has no address"):
        read_address(file)
    with pytest.raises(UsageError):
        resolved(f"file://{file}")


def test_what_is_no_file_is_said_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NoAddress, match="is not a file"):
        read_address(tmp_path / "pipe")
    with pytest.raises(NoAddress, match="does not exist yet"):
        read_address(tmp_path / "none")
    with pytest.raises(NoAddress, match=r"directory|not a file"):
        read_address(tmp_path)
    write_address(tmp_path / "one", "tcp://h:1")
    with pytest.raises(NoAddress, match="has no address"):
        read_address(tmp_path / "one", line=1)


@pytest.mark.parametrize(
    "address", ["tcp://h:1", "h:1", "file://", "file://relative", "file:///a\nb", "file:/x"]
)
def test_only_whole_paths_name_a_file(address: str) -> None:
    assert file_of(address) is None
    assert resolved(address) == address


def test_failure_to_write_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "address").mkdir()
    (tmp_path / "address" / "x").touch()
    with pytest.raises(OSError, match=r"directory|not empty"):
        write_address(tmp_path / "address", "tcp://h:1")
    assert [path.name for path in tmp_path.iterdir()] == ["address"]
