"""Files with the address of a broker, for clients of a broker that moves: `file:///shared/address`.

`diloco-broker serve --address-file` writes the file: the control address in the first line, the address
of the feed in the second. It replaces the file atomically, so readers never see a partial one. The
content is validated: a file that is too large or has no valid address is treated as not written yet. A
user who can write the file can redirect workers; with keys they accept only their own broker.
"""

from __future__ import annotations

import os
import secrets
import socket
import stat
from pathlib import Path

from diloco_protocol.addresses import EVERYWHERE, can_be_reached, several, with_scheme
from diloco_protocol.errors import UsageError

SCHEME = "file://"
LARGEST_FILE = 1024  # bytes
# The valid values of an address, as the end of the sentence "NAME is VALUE; it must be ...".
ADDRESS = "an address like tcp://10.0.0.1:8512, several separated by commas, or file:///PATH of one"


class NoAddress(Exception):
    """The file has no address (yet); the message is the end of a sentence with the reason."""


def file_of(address: str) -> Path | None:
    """The path in a file:// address; None for other addresses.

    A relative path gives None, because it would depend on the working directory of each process.
    """
    path = address.removeprefix(SCHEME)
    if path == address or not path.startswith("/") or not path.isprintable():
        return None
    return Path(path)


def read_address(file: Path, line: int = 0) -> str:
    """Read the control address from a file, or with `line=1` that of the feed.

    Raises:
        NoAddress: the file is missing, empty, or has no valid address.
    """
    try:
        # Without O_NONBLOCK opening a pipe would block until a writer opens it.
        descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with open(descriptor, "rb") as opened:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise NoAddress(f"{file} is not a file")
            content = opened.read(LARGEST_FILE + 1)
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError)
        reason = "does not exist yet" if is_missing else f"cannot be read: {error.strerror}"
        raise NoAddress(f"the file {file} {reason}") from None
    if not content.strip():
        raise NoAddress(f"the file {file} is empty")
    lines = content.decode("ascii", errors="replace").splitlines()
    # A port is required: a host alone may be part of a line that is being written.
    address = with_scheme(lines[line].strip(), None) if line < len(lines) else ""
    if len(content) > LARGEST_FILE or not leads_somewhere(address):
        raise NoAddress(f"the file {file} has no address like tcp://10.0.0.1:8512")
    return address


def leads_somewhere(address: str) -> bool:
    """Whether a socket can connect to an address: tcp://HOST:PORT or ipc://PATH, not a wildcard."""
    host = address.partition("://")[2].rpartition(":")[0]
    is_plain = address.isascii() and " " not in address
    return is_plain and host not in EVERYWHERE and _is_place(address)


def is_address(text: str) -> bool:
    """Whether a text is a valid address, or several different ones separated by commas.

    Valid are tcp://HOST:PORT, its short forms and ipc://PATH, and as a single address file:///PATH.
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
    """Return the text if it is a valid address; `name` is that of its option or keyword.

    Raises:
        UsageError: it is not valid.
    """
    if not is_address(text):
        raise wrong_address(name, text)
    return text


def wrong_address(name: str, text: str) -> UsageError:
    return UsageError(f"{name} is {text!a:.200}; it must be {ADDRESS}.")


def resolved(address: str, line: int = 0) -> str:
    """The address itself, or for a file:// address the current content of the file.

    Raises:
        UsageError: the file has no address.
    """
    file = file_of(address)
    if file is None:
        return address
    try:
        return read_address(file, line)
    except NoAddress as error:
        raise UsageError(f"The broker's address is unknown: {error}.") from None


def write_address(file: Path, *addresses: str) -> None:
    """Replace the content of the file by these addresses. Raises OSError.

    An address that is bound to all addresses of this machine is written with the machine's host name.
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
