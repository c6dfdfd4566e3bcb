"""Key files, with which workers, operators and monitors authenticate to a broker.

`diloco-broker keygen` makes them. A key file is JSON with a role, a name, a CURVE key pair, and the
public key of the broker, so a machine needs only this file. CURVE: http://curvezmq.org, in ZeroMQ
RFC 26.
"""

from __future__ import annotations

import json
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

from diloco_protocol.errors import UsageError
from diloco_protocol.roles import Peer, Role, check_name

VARIABLE = "DILOCO_KEYS"
# The subfolder of `keygen` with the key files for clients.
HANDED_OUT = "clients"
# A CURVE key in Z85, the text form of ZeroMQ (RFC 32).
_KEY = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
LARGEST_FILE = 4096  # bytes; a key file has about 300


@dataclass(frozen=True)
class Keys:
    """The content of a key file.

    Attributes:
        peer: role and name of its owner.
        public, secret: the key pair, in Z85.
        broker: the public key of the only broker that is accepted, in Z85.
    """

    peer: Peer
    public: bytes
    secret: bytes = field(repr=False)
    broker: bytes

    def lock(self, socket: zmq.Socket[Any]) -> None:
        """Make this socket authenticate, and accept only that broker. Call it before connecting."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.broker)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)

    def as_plain(self) -> dict[str, object]:
        """The JSON of the file."""
        return {
            "diloco_key": 1,
            "role": self.peer.role.value,
            "name": self.peer.name,
            "public": self.public.decode(),
            "secret": self.secret.decode(),
            "broker": self.broker.decode(),
        }


def find_keys(given: str | os.PathLike[str] | None, *roles: Role) -> Keys | None:
    """The given key, or the one that `DILOCO_KEYS` names; None without either.

    Args:
        given: a key file, or a folder of `diloco-broker keygen` with a single client key of one of these
            roles; the first role with a key is used.

    Raises:
        UsageError: the key cannot be used.
    """
    path = os.fspath(given) if given else os.environ.get(VARIABLE)
    if not path:
        return None
    file = Path(path).expanduser()
    return read_keys(_only_key_in(file, roles) if file.is_dir() else file)


def _only_key_in(folder: Path, roles: tuple[Role, ...]) -> Path:
    for role in roles:
        found = sorted((folder / HANDED_OUT).glob(f"{role.value}-*.key"))
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(each.name for each in found[:10])
            raise UsageError(f"{folder / HANDED_OUT} has several keys; name the file: {names}.")
    wanted = " or ".join(role.value for role in roles)
    raise UsageError(
        f"{folder} has no key of a {wanted}; give the key file that diloco-broker keygen made for this "
        "machine."
    )


def read_keys(file: Path) -> Keys:
    """Read a key file.

    Raises:
        UsageError: it is missing, readable by other users, or not a key file.
    """
    try:
        plain = plain_of(read_secret(file))
        role = plain.get("role")
        if role not in list(Role):
            raise ValueError(
                "it is the broker's own" if role == "broker" else "it has no valid role"
            )
        peer = Peer(Role(role), check_name(str(plain.get("name"))))
        keys = Keys(peer, *(key_of(plain, which) for which in ("public", "secret", "broker")))
    except OSError as error:
        raise UsageError(
            f"The key {file} cannot be read: {error.strerror}; give the key file that diloco-broker "
            "keygen made."
        ) from None
    except ValueError as error:
        raise UsageError(
            f"{file} is not a key of a worker, operator or monitor: {error}; give a key file that "
            "diloco-broker keygen made."
        ) from None
    if zmq.curve_public(keys.secret) != keys.public:
        raise UsageError(
            f"The public and secret key in {file} do not match; make a new key: diloco-broker keygen."
        )
    return keys


def read_secret(file: Path) -> bytes:
    """Read a file that only its owner may read.

    Raises:
        UsageError: other users may read it. OSError: it cannot be read.
    """
    with file.open("rb") as opened:
        mode = os.fstat(opened.fileno()).st_mode
        if not stat.S_ISREG(mode):
            raise UsageError(f"{file} is not a file; give the key file that keygen made.")
        if os.name == "posix" and mode & 0o077:
            raise UsageError(
                f"Other users of this machine may read the secret key {file}; run: chmod 600 {file}"
            )
        return opened.read(LARGEST_FILE)


def plain_of(text: bytes) -> dict[str, Any]:
    """Parse the JSON map of a key file. Raises ValueError."""
    try:
        plain = json.loads(text)
    except RecursionError:
        plain = None
    except ValueError:
        raise ValueError("it is not JSON") from None
    if not isinstance(plain, dict):
        raise ValueError("it is not a map")
    return plain


def key_of(plain: dict[str, Any], which: str) -> bytes:
    """One key of the map, in Z85. Raises ValueError."""
    text = plain.get(which)
    if not isinstance(text, str) or not _KEY.fullmatch(text):
        raise ValueError(f"its {which} key is not 40 characters of Z85")
    return text.encode()
