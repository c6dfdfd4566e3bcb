"""A file that says where a broker is, for those who follow one that moves: `file:///shared/address`.

`diloco-broker serve --address-file` writes it: its control address in the first line, that of its feed
in the second. It replaces the file as a whole, so no reader sees half of one. The file is not believed
blindly: it is small, and holds addresses that can be reached, or it counts as not written yet. Whoever
may write it can send workers elsewhere; with keys they speak to no other broker.
"""

from __future__ import annotations

import os
import secrets
import socket
import stat
from pathlib import Path

from diloco_protocol.addresses import (
    EVERYWHERE,
    can_be_reached,
    several,
    with_scheme,
)
from diloco_protocol.errors import UsageError

SCHEME = "file://"
LARGEST_FILE = 1024  # bytes
# What a command or a keyword takes, as the end of the sentence "NAME is VALUE; it must be ...".
ADDRESS = (
    "an address like tcp://10.0.0.1:8512, several with commas in between, or file:///PATH of one"
)


class NoAddress(Exception):
    """The file says no address, at least not yet; why, as the end of a sentence."""


def file_of(address: str) -> Path | None:
    """The file that an address names; None where it is an address itself.

    A path that is not absolute would depend on where each process was started, and gives none.
    """
    path = address.removeprefix(SCHEME)
    if path == address or not path.startswith("/") or not path.isprintable():
        return None
    return Path(path)


def read_address(file: Path, line: int = 0) -> str:
    """The control address that a file holds, or with `line=1` that of the feed.

    Raises:
        NoAddress: it is not there, is empty, or holds something else.
    """
    try:
        # Opening a pipe without a writer would block.
        descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with open(descriptor, "rb") as opened:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise NoAddress(f"{file} is not a file")
            content = opened.read(LARGEST_FILE + 1)
    except OSError as error:
        reason = "is not there yet" if isinstance(error, FileNotFoundError) else error.strerror
        raise NoAddress(f"the file {file} {reason}") from None
    if not content.strip():
        raise NoAddress(f"the file {file} is empty")
    lines = content.decode("ascii", errors="replace").splitlines()
    # With its port: a host alone may be half of a line that is being written.
    address = with_scheme(lines[line].strip(), None) if line < len(lines) else ""
    if len(content) > LARGEST_FILE or not leads_somewhere(address):
        raise NoAddress(f"the file {file} holds no address like tcp://10.0.0.1:8512")
    return address


def leads_somewhere(address: str) -> bool:
    """Whether a socket can connect to it: tcp://HOST:PORT or ipc://PATH, and no place to listen at."""
    host = address.partition("://")[2].rpartition(":")[0]
    is_plain = address.isascii() and " " not in address
    return is_plain and host not in EVERYWHERE and _is_place(address)


def is_address(text: str) -> bool:
    """Whether it looks like tcp://HOST:PORT, a short form of it or ipc://PATH, or several of these with
    commas in between and none twice, or is file:///PATH.
    """
    places = several(text)
    is_several = all(map(_is_place, places)) and len(set(places)) == len(places)
    return file_of(text) is not None or is_several


def _is_place(address: str) -> bool:
    scheme, _, rest = address.partition("://")
    host, colon, _ = rest.rpartition(":")
    is_host = bool(colon) and host.isascii() and not set(host) & set("/;* ") and host != ""
    is_known = (scheme == "ipc" and rest != "") or (scheme == "tcp" and is_host)
    return is_known and can_be_reached(address)


def check_address(name: str, text: str) -> str:
    """The text, if it is an address; `name` is what it was given as.

    Raises:
        UsageError: it is not one, in the same words whatever needs it.
    """
    if not is_address(text):
        raise wrong_address(name, text)
    return text


def wrong_address(name: str, text: str) -> UsageError:
    return UsageError(f"{name} is {text!a:.200}; it must be {ADDRESS}.")


def resolved(address: str, line: int = 0) -> str:
    """An address as it is, or what the file that it names says now.

    Raises:
        UsageError: the file holds no address.
    """
    file = file_of(address)
    if file is None:
        return address
    try:
        return read_address(file, line)
    except NoAddress as error:
        raise UsageError(f"The broker's address is not known: {error}.") from None


def write_address(file: Path, *addresses: str) -> None:
    """Replace the file by these addresses. One that is bound to every address of this machine is written
    with the machine's name.

    Raises OSError.
    """
    aside = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        with aside.open("w") as opened:
            opened.writelines(f"{_from_afar(address)}\n" for address in addresses)
            opened.flush()
            os.fsync(opened.fileno())
        aside.replace(file)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def _from_afar(address: str) -> str:
    scheme, separator, rest = address.partition("://")
    host, colon, port = rest.rpartition(":")
    if scheme == "tcp" and host in EVERYWHERE:
        host = socket.gethostname()
    return f"{scheme}{separator}{host}{colon}{port}"
